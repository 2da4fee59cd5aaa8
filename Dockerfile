# An image with the project in /opt/lm and its environment in /opt/venv, without a compiler.
# See docs/installation.md.
#
#   docker build -t lm .
#   docker build -t lm --build-arg BASE=registry.example.org/debian:bookworm-slim .     a mirror of your site
#
# BASE is a Debian or Ubuntu with Python 3.10 to 3.13. USE_GPU=1 creates an image for GPUs. The other
# arguments are settings of pip.
ARG BASE=debian:bookworm-slim

FROM $BASE AS build
ARG USE_GPU PIP_INDEX_URL PIP_EXTRA_INDEX_URL PIP_FIND_LINKS PIP_CERT
ARG DEBIAN_FRONTEND=noninteractive
RUN apt-get update && apt-get install -y --no-install-recommends g++ python3-venv
COPY . /opt/lm
ENV VENV=/opt/venv
# If the checkout was created with the umask 077, only its owner can read it.
RUN chmod -R a+rX /opt/lm
# Only the setup needs the build tools.
RUN /opt/lm/run_scripts/setup.sh && $VENV/bin/pip uninstall --quiet --yes cmake ninja && rm -r $VENV/wheels

FROM $BASE
ARG DEBIAN_FRONTEND=noninteractive
RUN apt-get update && apt-get install -y --no-install-recommends python3 && rm -rf /var/lib/apt/lists/*
COPY --from=build /opt/lm /opt/lm
COPY --from=build /opt/venv /opt/venv
# Containers usually run as root.
ENV VENV=/opt/venv PATH=/opt/venv/bin:/opt/lm/run_scripts:$PATH \
    OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
WORKDIR /work
CMD ["lm-train", "--help"]
