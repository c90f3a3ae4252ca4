# One image for every process of a deployment, and a larger one for GPU workers:
#
#   docker build --target tangram -t arl-tangram:0.1.0 .
#   docker build --target gpu     -t arl-tangram-gpu:0.1.0 .
#
# BASE is any Debian-like image with Python 3.11 or newer and its venv module; both stages must share it, since the virtual
# environment points at its interpreter. What is installed is pinned by constraints.txt. The image of GPU workers has a second
# environment, /opt/vllm, since vLLM needs other versions of transformers and numpy than the worker; constraints-vllm-gpu.txt
# pins it. pip takes its settings from the build arguments PIP_INDEX_URL, PIP_EXTRA_INDEX_URL and PIP_FIND_LINKS, so that an index of one's own leaves nothing behind.
ARG BASE=python:3.12-slim-bookworm

FROM ${BASE} AS build
ARG EXTRAS=server,gateway,web,metrics,otel,report,postgres,containers
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ARG PIP_FIND_LINKS
WORKDIR /src
RUN python3 -m venv /opt/tangram
# Only what decides on the libraries, so that a change of the source does not install them again: empty packages stand for it.
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY tangram/pyproject.toml tangram/README.md tangram/LICENSE tangram/
RUN mkdir -p app scheduler workers migrations examples/repo \
 && touch tangram/__init__.py app/__init__.py examples/rollouts.jsonl \
 && PIP_CONSTRAINT=constraints.txt /opt/tangram/bin/pip install --no-cache-dir --disable-pip-version-check ./tangram ".[${EXTRAS}]"

# The wheels of client and server.
FROM build AS wheels
COPY . .
RUN PIP_CONSTRAINT=constraints.txt /opt/tangram/bin/pip wheel --no-cache-dir --disable-pip-version-check --no-deps --wheel-dir /wheels ./tangram .

FROM build AS build-slim
COPY --from=wheels /wheels /wheels
RUN /opt/tangram/bin/pip install --no-cache-dir --disable-pip-version-check --no-index --no-deps --force-reinstall /wheels/*.whl \
 && /opt/tangram/bin/pip uninstall --yes --quiet pip setuptools

# What both images share: settings, and a user that is not root. compose makes the CPU worker root, and says why.
FROM ${BASE} AS shared
ENV PATH=/opt/tangram/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    TANGRAM_STATE_DIR=/var/lib/tangram
RUN useradd --uid 10001 --user-group --no-create-home --home-dir /var/lib/tangram --shell /usr/sbin/nologin tangram \
 && install -d -o tangram -g tangram -m 0700 /var/lib/tangram
WORKDIR /srv/tangram
USER tangram
CMD ["tangram", "--help"]

FROM shared AS tangram
COPY --from=build-slim /opt/tangram /opt/tangram

FROM build AS build-gpu
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ARG PIP_FIND_LINKS
COPY --from=wheels /wheels /wheels
RUN PIP_CONSTRAINT=constraints.txt /opt/tangram/bin/pip install --no-cache-dir --disable-pip-version-check ".[gpu]" \
 && /opt/tangram/bin/pip install --no-cache-dir --disable-pip-version-check --no-index --no-deps --force-reinstall /wheels/*.whl \
 && /opt/tangram/bin/pip uninstall --yes --quiet pip

FROM ${BASE} AS build-vllm
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ARG PIP_FIND_LINKS
RUN python3 -m venv /opt/vllm
COPY constraints-vllm-gpu.txt ./
RUN PIP_CONSTRAINT=constraints-vllm-gpu.txt /opt/vllm/bin/pip install --no-cache-dir --disable-pip-version-check vllm \
 && /opt/vllm/bin/pip uninstall --yes --quiet pip

FROM shared AS gpu
USER root
# torch and Triton compile kernels when a server of vLLM starts.
RUN apt-get update \
 && apt-get install --yes --no-install-recommends gcc libc6-dev \
 && rm -rf /var/lib/apt/lists/*
USER tangram
COPY --from=build-gpu /opt/tangram /opt/tangram
COPY --from=build-vllm /opt/vllm /opt/vllm
ENV TANGRAM_VLLM_PYTHON=/opt/vllm/bin/python

# A build that names no target ends here.
FROM tangram
