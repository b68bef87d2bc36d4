# syntax=docker/dockerfile:1
#
#   docker build --target cpu  -t decode-service:cpu .
#   docker build --target cuda -t decode-service:cuda .
#   docker run --shm-size=4g --stop-timeout=60 -p 8000:8000 decode-service:cpu
#   docker run --shm-size=16g --stop-timeout=60 --gpus all --ulimit memlock=-1 -p 8000:8000 decode-service:cuda
#
# --shm-size: Ray's object store lives in /dev/shm (latents and pixels pass through it), and so does NCCL. With Docker's
# default of 64 MB Ray falls back to files, with a warning, and NCCL fails.
#
# --stop-timeout: Serve drains for about half a minute before it ends.
#
# The base is plain Python for both targets. torch's CUDA wheels bring CUDA, cuDNN and NCCL, and Ray's wheels bring Ray
# and HAProxy, so a CUDA or a Ray base image would hold a second copy of each, and tie the Python and Ray versions to
# their tags. The GPU's driver comes from the host (NVIDIA container toolkit). On KubeRay the image serves as head and as
# worker: `ray` is on the PATH of login shells, and wget is there for KubeRay's probes.

ARG BASE_IMAGE=python:3.11-slim-bookworm

# ---- sources: what an installation reads -------------------------------------------------------------------------------
FROM ${BASE_IMAGE} AS sources
WORKDIR /build
COPY pyproject.toml constraints-cpu.txt LICENSE NOTICE ./
COPY scripts/install_image.sh scripts/
COPY clients/python clients/python
COPY decode_service decode_service

# ---- installations: one virtual environment per target -------------------------------------------------------------------
FROM sources AS install-cpu
# Where torch's CPU wheels are, if not the default index: --build-arg PIP_ARGS="--extra-index-url ..."
ARG PIP_ARGS=""
RUN --mount=type=cache,target=/root/.cache/pip PIP_ARGS="${PIP_ARGS}" scripts/install_image.sh /opt/venv cpu

FROM sources AS install-cuda
# Another torch than the newest: --build-arg PIP_ARGS="torch==2.13.0"
ARG PIP_ARGS=""
RUN --mount=type=cache,target=/root/.cache/pip PIP_ARGS="${PIP_ARGS}" scripts/install_image.sh /opt/venv cuda

# ---- runtime: everything but the virtual environment -------------------------------------------------------------------
FROM ${BASE_IMAGE} AS runtime
RUN apt-get update \
    && apt-get install --yes --no-install-recommends tini wget \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 1000 decode \
    && echo 'export PATH="/opt/venv/bin:$PATH"' > /etc/profile.d/venv.sh
# HAProxy instead of Serve's Python proxy: 2 to 7 times faster on large bodies, and its memory does not grow with them.
# It must be set before Ray starts, on every node.
ENV PATH="/opt/venv/bin:${PATH}" \
    PYTHONUNBUFFERED=1 \
    RAY_SERVE_ENABLE_HA_PROXY=1 \
    RAY_USAGE_STATS_ENABLED=0 \
    HF_HOME=/home/decode/.cache/huggingface \
    TORCHINDUCTOR_CACHE_DIR=/home/decode/.cache/inductor \
    TRITON_CACHE_DIR=/home/decode/.cache/triton
WORKDIR /home/decode
COPY deploy deploy
USER decode
EXPOSE 8000
# The service is healthy as soon as it answers; whether models are loaded is /readyz, which belongs to a load balancer.
HEALTHCHECK --interval=10s --timeout=5s --start-period=120s --retries=3 \
    CMD ["wget", "--quiet", "--tries=1", "--output-document=/dev/null", "http://127.0.0.1:8000/healthz"]
# What `serve run` shuts down cleanly on.
STOPSIGNAL SIGINT
ENTRYPOINT ["tini", "--"]
CMD ["serve", "run", "deploy/config.yaml"]

# ---- targets -----------------------------------------------------------------------------------------------------------
FROM runtime AS cuda
# torch.compile builds its kernels' launchers with a C compiler.
USER root
RUN apt-get update && apt-get install --yes --no-install-recommends gcc g++ && rm -rf /var/lib/apt/lists/*
USER decode
ENV NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
COPY --from=install-cuda /opt/venv /opt/venv

FROM runtime AS cpu
COPY --from=install-cpu /opt/venv /opt/venv
