# The images of the router and of the pool. Build them in the checkout's folder:
#   docker build -f deploy/images/router.Dockerfile -t sglang-ppd/router:0.1.0 .
#   docker build -f deploy/images/router.Dockerfile --target pool -t sglang-ppd/pool:0.1.0 .
# The health check is for port 8000 without TLS; else give docker run another --health-cmd.
ARG PYTHON=3.12-slim-bookworm

FROM python:${PYTHON} AS wheel
# Versions are those of the base image's distribution.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /source
COPY . .
# The router's token path is compiled, or the build fails.
RUN PPD_COMPILE=1 pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM wheel AS router-files
RUN python -m venv /opt/ppd \
    && /opt/ppd/bin/pip install --no-cache-dir "$(echo /wheels/*.whl)[gateway,k8s,kv-events,milvus,otel,shared]" \
    && /opt/ppd/bin/ppd-router --version

FROM wheel AS pool-files
RUN python -m venv /opt/ppd \
    && /opt/ppd/bin/pip install --no-cache-dir "$(echo /wheels/*.whl)[pool]" \
    && /opt/ppd/bin/ppd-pool --version

FROM python:${PYTHON} AS base
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.vendor="The sglang-ppd contributors" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
RUN groupadd --system --gid 10001 ppd \
    && useradd --system --uid 10001 --gid ppd --no-create-home --shell /usr/sbin/nologin ppd
ENV PATH=/opt/ppd/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1
USER 10001:10001

FROM base AS pool
LABEL org.opencontainers.image.title="sglang-ppd pool" \
      org.opencontainers.image.description="Vector search for prefill and decode"
COPY --from=pool-files /opt/ppd /opt/ppd
EXPOSE 8100
HEALTHCHECK --interval=10s --timeout=5s --start-period=120s \
    CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8100/health', timeout=4)"]
ENTRYPOINT ["ppd-pool"]
CMD ["serve", "--host", "0.0.0.0", "--data", "/data"]

FROM base AS router
LABEL org.opencontainers.image.title="sglang-ppd router" \
      org.opencontainers.image.description="Multi-turn router for prefill and decode workers on SGLang"
COPY --from=router-files /opt/ppd /opt/ppd
EXPOSE 8000 8001
HEALTHCHECK --interval=10s --timeout=5s --start-period=120s \
    CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8000/live', timeout=4)"]
ENTRYPOINT ["ppd-router"]
CMD ["--config", "/etc/ppd/config/router.toml"]
