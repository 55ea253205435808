# The image of workers: SGLang's own, with the plugin. Build it in the checkout's folder:
#   docker build -f deploy/images/worker.Dockerfile -t sglang-ppd/worker:0.1.0 .
ARG PYTHON=3.12-slim-bookworm
ARG SGLANG=v0.5.23

FROM python:${PYTHON} AS wheel
WORKDIR /source
COPY . .
# Workers use nothing of what is compiled.
RUN PPD_COMPILE=0 pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM lmsysorg/sglang:${SGLANG}
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="sglang-ppd worker" \
      org.opencontainers.image.description="SGLang with the plugin for local append-prefill" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.vendor="The sglang-ppd contributors" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
COPY --from=wheel /wheels /tmp/wheels
ENV PIP_BREAK_SYSTEM_PACKAGES=1
# Without dependencies: SGLang requires all that the plugin imports.
# The build fails for an SGLang that the plugin does not fit, and without Mooncake.
RUN python3 -m pip install --no-cache-dir --no-deps /tmp/wheels/*.whl \
    && rm -r /tmp/wheels \
    && python3 -c "from importlib.metadata import version; from importlib.util import find_spec; \
from sglang_patches.engines import SUPPORTED; \
assert version('sglang') in SUPPORTED and find_spec('mooncake')"
ENV PYTHONUNBUFFERED=1
EXPOSE 30000 8998
ENTRYPOINT ["ppd-worker"]
