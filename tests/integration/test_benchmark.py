"""The commands of `lm.benchmark` on tiny models: measurements, output and errors."""

import importlib.util
import json

import pytest

from lm.benchmark.step_time import PEERS
from lm.report.benchmarks import read_benchmark
from tests.commands import events, one_error, run_module

TINY = (
    "--config", "config_test", "--hidden_size", 16, "--num_steps", 5, "--batch_size", 4,
    "--vocab_size", 60, "--intra_op_threads", 1,
)  # fmt: skip

pytestmark = pytest.mark.timeout(240)


def run_benchmark(out, command, *arguments, cwd=None, **env):
    """Run a benchmark that writes its results and its cache into a directory."""
    return run_module(
        "lm.benchmark", command, "--out", out, *TINY, *arguments, timeout=200, cwd=cwd,
        env={"XDG_CACHE_HOME": f"{out}/cache", **env},
    )  # fmt: skip


def benchmark(out, command, *arguments, **options):
    """Run a benchmark; return its record and the finished process."""
    result = run_benchmark(out, command, *arguments, **options)
    assert result.returncode == 0, result.stdout + result.stderr
    (path,) = out.glob("*.json")
    return json.loads(path.read_text()), result


@pytest.mark.parametrize(
    "hidden",
    [("torch", "jax"), pytest.param((), marks=pytest.mark.soak)],
    ids=["tensorflow", "all"],
)
def test_all_implementations_train_the_same_model(tmp_path, corpora, hidden):
    for package in hidden:
        (tmp_path / f"{package}.py").write_text(f"raise ModuleNotFoundError(name='{package}')\n")
    flags = ("--repeats", 1, "--peers")
    record, result = benchmark(tmp_path, "step", *flags, cwd=tmp_path)
    implementations = {row["implementation"]: row for row in record["implementations"]}
    ours = implementations["ours"]
    assert len(ours["first_losses"]) == 4
    for name in PEERS["float32"]:
        package = name.split("-")[0]
        if package not in hidden and importlib.util.find_spec(package):
            assert name in implementations
        else:
            missing = f"left out: {name} on 1 rank failed: {package} is not installed; run pip"
            assert missing in result.stderr
    for found in implementations.values():
        # The updates, the clipping and the carried state agree too if four losses are equal.
        assert found["first_losses"] == pytest.approx(ours["first_losses"], rel=1e-4)
        assert found["first_grad_norms"] == pytest.approx(ours["first_grad_norms"], rel=1e-4)
        seconds = found["seconds_per_step"]
        assert len(seconds) == 1 and seconds[0] > 0
        assert found["best"] == pytest.approx(4 * 5 / seconds[0])
        assert found["peak_mb"] > 100
        assert found["share_of_gemm_peak"] > 0
    assert ours["time_over_ours"]["value"] == 1
    assert record["gemm_gflops"] > 0
    assert "| tensorflow" in result.stdout
    assert any(line.startswith("tensorflow") for line in record["versions"])
    # A later run reports its share of the peak that the benchmark has measured.
    run = ("--data_path", corpora, "--output_dir", tmp_path / "run")
    steps = ("--max_steps", 2, "--log_every_steps", 1, "--noeval")
    cache = f"{tmp_path}/cache"
    trained = run_module("lm.train", *TINY, *run, *steps, env={"XDG_CACHE_HOME": cache})
    assert trained.returncode == 0, trained.stderr
    for event in events(tmp_path / "run", "step"):
        assert 0 < event["share_of_gemm_peak"] < 1


@pytest.mark.soak
@pytest.mark.parametrize(
    "network", [("gru",), ("transformer",), ("transformer", "--nomemory", "--tie_weights")]
)
def test_peers_train_the_same_user_defined_network(tmp_path, network):
    pytest.importorskip("torch"), pytest.importorskip("jax")
    name, *flags = network
    # Random masks would differ. Large weights give every weight a visible share of the loss.
    same = ("--keep_prob", 1, "--init_scale", 0.5, "--num_layers", 2, "--repeats", 1, "--peers")
    record, _ = benchmark(tmp_path, "step", "--config", f"config_{name}", *flags, *same)
    ours, *peers = record["implementations"]
    assert [row["implementation"] for row in peers] == ["torch", "torch-compile", "jax"]
    for row in peers:
        for key in ("first_losses", "first_grad_norms"):
            assert row[key] == pytest.approx(ours[key], rel=1e-4)


@pytest.mark.soak
def test_bfloat16_is_compared_with_float32(tmp_path):
    arguments = ("--repeats", 1, "--precision", "bfloat16", "--peers")
    rows = benchmark(tmp_path, "step", *arguments)[0]["implementations"]
    losses = [row["first_losses"] for row in rows if row["implementation"].startswith("ours")]
    assert losses[0] != losses[1]
    assert losses[0] == pytest.approx(losses[1], rel=1e-2)


def test_products_of_the_output_layer_are_compared_with_onednn(tmp_path):
    out = tmp_path / "my results"
    record = benchmark(out, "products")[0]
    assert record["command"].startswith(f"python -m lm.benchmark products --out '{out}' ")
    rows = record["products"]
    assert [row["sizes"] for row in rows] == ["20 x 16 x 60", "16 x 20 x 60", "20 x 60 x 16"]
    for row in rows:
        assert row["speed_over_onednn"] == pytest.approx(row["onednn_ms"] / row["ms"])


def test_products_need_the_compiled_operations(tmp_path):
    result = run_benchmark(tmp_path, "products", LM_KERNELS="0")
    assert "`products` measures compiled operations; no compiled ops: " in one_error(result, 1)


def test_a_trace_divides_a_step_among_its_operations(tmp_path):
    # Dropout of recurrent weights adds a second set of gradients.
    flags = ("--recurrent_keep_prob", 0.5, "--keep_prob", 0.5, "--reset_state", "line")
    trace = benchmark(tmp_path, "trace", *flags)[0]
    parts = {
        (row["part"], row["operations"].partition(" ")[0]): row["ms"] for row in trace["parts"]
    }
    assert sum(parts.values()) < 2 * trace["ms_per_step"]
    assert parts["output layer, forward", "LmSoftmax"] > 0
    assert read_benchmark(*map(str, tmp_path.glob("*.json"))).rows == trace["parts"]
    assert parts["network, backward", "LmDropout"] > 0 and ("update", "LmDropout") not in parts


@pytest.mark.soak
def test_torch_trains_the_same_adaptive_softmax(tmp_path):
    pytest.importorskip("torch")
    cutoffs = ("--adaptive_softmax_cutoffs", "10,30", "--repeats", 1, "--peers")
    ours, torch = benchmark(tmp_path, "step", *cutoffs)[0]["implementations"]
    assert torch["first_losses"] == pytest.approx(ours["first_losses"], rel=1e-4)
    assert torch["first_grad_norms"] == pytest.approx(ours["first_grad_norms"], rel=1e-4)


def test_scaling(tmp_path):
    record, result = benchmark(tmp_path, "scaling", "--repeats", 1, "--ranks", "1,2")
    rows = {(row["scaling"], row["ranks"]): row for row in record["rows"]}
    assert rows["strong", 1]["speedup"]["value"] == rows["weak", 1]["speedup"]["value"] == 1
    assert rows["strong", 1]["mb_sent_per_rank"] == 0
    assert (rows["strong", 2]["batch_size"], rows["weak", 2]["batch_size"]) == (4, 8)
    for kind in ("strong", "weak"):
        row = rows[kind, 2]
        assert row["efficiency"] == pytest.approx(row["speedup"]["value"] / 2)
        for part in ("mb_sent_per_rank", "compute_ms", "exchange_ms"):
            assert row[part] > 0
        assert len(row["seconds_per_step"]) == 1
    assert result.stdout.count("| strong") == 2


@pytest.mark.soak
def test_advice(tmp_path):
    # The slash in the name must not become a directory.
    arguments = ("--name", "a/b", "--repeats", 1, "--batch_size", 2, "--link_gbps", 0.001)
    record, result = benchmark(tmp_path, "advise", *arguments)
    ranks = [(row["scaling"], row["ranks"]) for row in record["predictions"]]
    assert [("strong", n) for n in (1, 2)] == ranks[:2] and ranks[-1] == ("weak", 4096)
    # One rank is faster on any machine if the link has 1 Mbit/s.
    assert "ONE RANK WINS against 2 (strong scaling), 2 (weak" in result.stderr
