# One target per service: docker build --target scheduler -t tailrace-scheduler . (make images builds all).
# BASE needs Python 3.11 or later; BASE_BUILD the same Python with venv, and strip for smaller images; both have
# a GPU pair (CUDA). Digests pin them: BASE=name@sha256:... It builds with BuildKit and, slower, without: that
# builds every stage above the target.
#
# An image is the base, one user, /opt/tailrace (Python and what every service needs, one layer that all share),
# /opt/extra (what this service needs beside it) and /opt/tailrace/src (the packages of the tree). Nothing that
# builds is in it. Files belong to the user that runs them, so that live update can replace them.
ARG BASE=python:3.12-slim-bookworm
ARG BASE_BUILD=${BASE}
ARG BASE_GPU=${BASE}
ARG BASE_GPU_BUILD=${BASE_BUILD}

# pip's settings come by build arguments; they stay in these stages. images/local may hold wheels and ca.crt,
# the certificates with which this machine's pip trusts its index.
FROM ${BASE_BUILD} AS build
ARG PIP_INDEX_URL PIP_EXTRA_INDEX_URL
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_DEFAULT_TIMEOUT=180 PIP_FIND_LINKS=/local
RUN python3 -m venv /opt/pip && python3 -m venv --without-pip /opt/tailrace
COPY images/local /local/
COPY images/install.sh constraints.txt pyproject.toml /src/
RUN sh /src/install.sh ""
ENV PIP_PREFIX=/opt/extra

FROM ${BASE} AS service
COPY images/user.sh /opt/
RUN sh /opt/user.sh
ENV PATH=/opt/tailrace/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 TQDM_DISABLE=1
WORKDIR /opt/tailrace
USER 65532:65532
COPY --chown=65532:65532 --from=build /opt/tailrace /opt/tailrace

FROM scratch AS sources
COPY --chown=65532:65532 protos/tailrace_protos /tailrace_protos
COPY --chown=65532:65532 shared services /

FROM service AS scheduler
COPY --chown=65532:65532 --from=sources / /opt/tailrace/src
ENTRYPOINT ["python", "-m", "tailrace.start", "tailrace_scheduler"]

FROM service AS weight-sync
COPY --chown=65532:65532 --from=sources / /opt/tailrace/src
ENTRYPOINT ["python", "-m", "tailrace.start", "tailrace_weight_sync"]

FROM service AS sandbox
COPY --chown=65532:65532 --from=sources / /opt/tailrace/src
ENTRYPOINT ["python", "-m", "tailrace.start", "tailrace_sandbox"]

FROM build AS build-agents
RUN sh /src/install.sh agents
FROM service AS agents
COPY --chown=65532:65532 --from=build-agents /opt/extra /opt/extra
COPY --chown=65532:65532 --from=sources / /opt/tailrace/src
ENTRYPOINT ["python", "-m", "tailrace.start", "tailrace_agents"]

FROM build AS build-gateway
RUN sh /src/install.sh gateway
FROM service AS gateway
COPY --chown=65532:65532 --from=build-gateway /opt/extra /opt/extra
COPY --chown=65532:65532 --from=sources / /opt/tailrace/src
ENTRYPOINT ["python", "-m", "tailrace.start", "tailrace_gateway"]

FROM build AS build-reward
RUN sh /src/install.sh reward
FROM service AS reward
COPY --chown=65532:65532 --from=build-reward /opt/extra /opt/extra
COPY --chown=65532:65532 --from=sources / /opt/tailrace/src
ENTRYPOINT ["python", "-m", "tailrace.start", "tailrace_reward"]

FROM build AS build-autoscaler
RUN sh /src/install.sh autoscaler
FROM service AS autoscaler
COPY --chown=65532:65532 --from=build-autoscaler /opt/extra /opt/extra
COPY --chown=65532:65532 --from=sources / /opt/tailrace/src
ENTRYPOINT ["python", "-m", "tailrace.start", "tailrace_autoscaler"]

# Follows a run to its end, and ends the release's workloads with it.
FROM build-autoscaler AS build-run
RUN sh /src/install.sh run
FROM service AS run
COPY --chown=65532:65532 --from=build-run /opt/extra /opt/extra
COPY --chown=65532:65532 --from=sources / /opt/tailrace/src
ENTRYPOINT ["python", "-m", "tailrace_cli.commands.follow"]

# What needs torch. An engine's pins decide for its whole environment.
FROM ${BASE_GPU_BUILD} AS build-gpu
ARG PIP_INDEX_URL PIP_EXTRA_INDEX_URL
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_DEFAULT_TIMEOUT=180 PIP_FIND_LINKS=/local
RUN python3 -m venv /opt/pip && python3 -m venv --without-pip /opt/tailrace
COPY images/local /local/
COPY images/install.sh constraints.txt pyproject.toml /src/

FROM ${BASE_GPU} AS gpu
COPY images/user.sh /opt/
RUN sh /opt/user.sh
ENV PATH=/opt/tailrace/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 TQDM_DISABLE=1
WORKDIR /opt/tailrace
USER 65532:65532

FROM build-gpu AS build-torch
RUN sh /src/install.sh inference,learner torch
FROM gpu AS torch
COPY --chown=65532:65532 --from=build-torch /opt/tailrace /opt/tailrace
COPY --chown=65532:65532 --from=sources / /opt/tailrace/src

FROM torch AS learner
ENTRYPOINT ["python", "-m", "tailrace.start", "tailrace_learner"]

FROM torch AS inference-torch
ENTRYPOINT ["python", "-m", "tailrace.start", "tailrace_inference"]

FROM build-gpu AS build-vllm
ARG VLLM=vllm==0.32.0
RUN sh /src/install.sh inference "${VLLM}"
FROM gpu AS inference-vllm
COPY --chown=65532:65532 --from=build-vllm /opt/tailrace /opt/tailrace
COPY --chown=65532:65532 --from=sources / /opt/tailrace/src
ENTRYPOINT ["python", "-m", "tailrace.start", "tailrace_inference"]

FROM build-gpu AS build-sglang
ARG SGLANG=sglang==0.5.23
RUN sh /src/install.sh inference "${SGLANG}"
FROM gpu AS inference-sglang
COPY --chown=65532:65532 --from=build-sglang /opt/tailrace /opt/tailrace
COPY --chown=65532:65532 --from=sources / /opt/tailrace/src
ENTRYPOINT ["python", "-m", "tailrace.start", "tailrace_inference"]
