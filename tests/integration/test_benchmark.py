"""The benchmarks' real command lines on tiny sizes: what they compute, write and refuse."""

import importlib.util
import json

import pytest

from tests.commands import run_module

TINY = (
    "--config", "config_test", "--hidden_size", 16, "--num_steps", 5, "--batch_size", 4,
    "--vocab_size", 60, "--repeats", 2, "--steps_per_repeat", 3, "--intra_op_threads", 1,
)  # fmt: skip
HAS_TORCH = importlib.util.find_spec("torch") is not None

pytestmark = pytest.mark.timeout(240)


def benchmark(out, command, *arguments):
    """Run a benchmark; return its record and what it printed."""
    result = run_module("lm.benchmark", command, "--out", out, *arguments, timeout=200)
    assert result.returncode == 0, result.stdout + result.stderr
    (path,) = out.glob("*.json")
    for suffix in (".png", ".pdf"):
        assert path.with_suffix(suffix).stat().st_size > 1000
    return json.loads(path.read_text()), result


def test_all_contestants_train_the_same_model(tmp_path):
    record, result = benchmark(tmp_path, "step", *TINY, "--gemm_size", 64, "--peers")
    contestants = record["contestants"]
    ours = contestants["ours"]
    assert len(ours["first_losses"]) == 4
    assert "tensorflow" in contestants
    if HAS_TORCH:
        assert record["best_torch"] in ("torch", "torch-compile")
        assert "torch" in contestants
    else:
        assert "PyTorch is not installed" in result.stderr
    for found in contestants.values():
        # Four steps: so the updates, the clipping and the carried state agree too.
        assert found["first_losses"] == pytest.approx(ours["first_losses"], rel=1e-4)
        assert found["first_grad_norms"] == pytest.approx(ours["first_grad_norms"], rel=1e-4)
        seconds = found["seconds_per_step"]
        assert len(seconds) == 2 and min(seconds) > 0
        # However unlike they are, on a machine that has other work to do.
        assert 4 * 5 / max(seconds) <= found["words_per_second"]["mean"] <= 4 * 5 / min(seconds)
        assert min(seconds) <= found["ms_per_step"]["mean"] / 1000 <= max(seconds)
        assert found["peak_rss_bytes"] > 1e8
    assert ours["time_over_ours"]["value"] == 1
    assert record["gemm_gflops"]["median"] > 0 and record["share_of_gemm_peak"]["median"] > 0
    assert "| tensorflow" in result.stdout


@pytest.mark.soak
def test_bfloat16_beside_float32(tmp_path):
    arguments = (*TINY, "--precision", "bfloat16", "--gemm_size", 64, "--peers")
    contestants = benchmark(tmp_path, "step", *arguments)[0]["contestants"]
    losses = [contestants[name]["first_losses"] for name in ("ours", "ours-float32")]
    assert losses[0] != losses[1]
    assert losses[0] == pytest.approx(losses[1], rel=1e-2)


def test_scaling(tmp_path):
    record, result = benchmark(tmp_path, "scaling", *TINY, "--ranks", "1,2")
    one, two = record["ranks"]
    assert one["strong"]["speedup"]["value"] == one["weak"]["speedup"]["value"] == 1
    assert one["strong"]["bytes_sent_per_rank"] == 0
    assert (two["strong"]["batch_size"], two["weak"]["batch_size"]) == (4, 8)
    assert two["strong"]["bytes_sent_per_rank"] > 0
    assert two["weak"]["efficiency"]["value"] == pytest.approx(two["weak"]["speedup"]["value"] / 2)
    assert two["efficiency_against_compute"]["value"] > 0
    for kind in ("strong", "weak"):
        assert two[kind]["split_ms"]["compute"] > 0 and two[kind]["split_ms"]["input"] > 0
    assert result.stdout.count("| strong") == 2


def test_exchange(tmp_path):
    record, _ = benchmark(tmp_path, "exchange", "--ranks", 2, "--max_mb", 0.01, "--repeats", 2)
    for name in ("horovod", "mpi"):
        assert [each["bytes"] for each in record[name]["sizes"]] == [4, 1024, 4096]
        assert all(each["us"]["median"] > 0 for each in record[name]["sizes"])
        assert record[name]["sizes"][-1]["bus_gb_per_second"] > 0


def test_advice(tmp_path):
    # A name of which training would make a directory.
    arguments = (
        *TINY,
        "--name",
        "a/b",
        "--ranks",
        "1,2",
        "--max_ranks",
        1024,
        "--link_gbps",
        0.001,
    )
    record, result = benchmark(tmp_path, "advise", *arguments)
    for kind in ("strong", "weak"):
        for row in record["here"][kind]:
            predicted, measured = row["step_ms"], row["measured_step_ms"]
            assert row["error"] == pytest.approx(predicted / measured - 1)
    assert [row["ranks"] for row in record["cluster"]["strong"]] == [1, 2, 4]
    assert record["cluster"]["weak"][-1]["ranks"] == 1024
    # A megabit a second: whatever this machine does, one rank is faster.
    assert "warning: on the cluster, strong scaling: ONE RANK WINS" in result.stdout


@pytest.mark.parametrize(
    "arguments, num_ranks, message",
    [
        (["fly"], 1, "'fly' is not one of the commands step, scaling, exchange, advise"),
        (["step"], 2, "without mpirun"),
        (["step", "--data_path", "no/such/directory"], 1, "is not a directory"),
        (["advise", "--hosts", "a:1,b:1"], 1, "advise measures one host, not a:1,b:1"),
    ],
)
def test_what_cannot_be_run_is_one_line(arguments, num_ranks, message, tmp_path):
    if num_ranks == 1 and len(arguments) > 1:
        arguments = [*arguments, "--out", tmp_path]
    result = run_module("lm.benchmark", *arguments, num_ranks=num_ranks, timeout=60)
    assert result.returncode in (1, 2)
    lines = [line for line in result.stderr.splitlines() if line.startswith("lm: error")]
    assert len(lines) == 1 and message in lines[0]
    assert "Traceback" not in result.stderr


def test_help_lists_the_commands():
    result = run_module("lm.benchmark", "--help", timeout=60)
    assert result.returncode == 0
    assert all(name in result.stdout for name in ("step", "scaling", "exchange", "advise"))
