# headrace on a CPU: docs/install.md tells how to build and run it.

FROM python:3.12-slim-bookworm AS build
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*
RUN python -m venv /opt/headrace
ENV PATH=/opt/headrace/bin:$PATH PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
# Mirrors: --build-arg TORCH_INDEX=URL for torch's CPU build, --build-arg PIP_INDEX_URL=URL for all else.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ARG PIP_INDEX_URL
# First, and from this index: PyPI's torch brings CUDA's libraries. A layer of its own: it changes rarely.
RUN pip install "torch>=2.11" --index-url "$TORCH_INDEX"
COPY packages /src/packages
RUN pip install /src/packages/*

FROM python:3.12-slim-bookworm
# Folders that volumes are mounted at: a new volume takes the owner of the folder below it.
RUN useradd --create-home --uid 10001 headrace \
    && install --directory --owner headrace --group headrace /var/lib/headrace/models /var/lib/headrace/kv
COPY --from=build /opt/headrace /opt/headrace
# HF_HOME: where models that are named and not given as folders are kept, and found again.
ENV PATH=/opt/headrace/bin:$PATH PYTHONUNBUFFERED=1 HF_HOME=/var/lib/headrace/models
VOLUME /var/lib/headrace/models
USER headrace
WORKDIR /home/headrace
EXPOSE 8000
HEALTHCHECK --interval=30s --timeout=5s --start-period=10m --retries=3 \
    CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
ENTRYPOINT ["headrace"]
# All addresses of the container; who may reach them is decided by `docker run -p`.
CMD ["serve", "--host", "0.0.0.0"]
