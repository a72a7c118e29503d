# The gateway alone, without the simulator's or the tests' needs: no compiler, no shell script, not root.
#   docker build -t radixgate .
#   docker run -p 8080:8080 radixgate serve --backend http://vllm-a:8000 --backend http://vllm-b:8000
# With exact token counts, KV events, zstd and traces (the extras), some 70 MB more:
#   docker build -t radixgate --build-arg LOCK=full .

FROM python:3.11-slim AS build
WORKDIR /src
RUN python -m venv /opt/radixgate
ENV PATH=/opt/radixgate/bin:$PATH PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
ARG LOCK=core
COPY requirements/core.lock requirements/full.lock requirements/build.lock requirements/
RUN pip install --require-hashes -r requirements/${LOCK}.lock
RUN python -m venv /opt/build && /opt/build/bin/pip install --require-hashes -r requirements/build.lock
COPY pyproject.toml README.md LICENSE ./
COPY gateway gateway
RUN /opt/build/bin/pip wheel --no-deps --no-build-isolation -w dist . \
 && pip install --no-deps dist/radixgate-*.whl \
 && pip uninstall --yes setuptools pip

FROM python:3.11-slim
RUN useradd --system --uid 10001 --no-create-home --shell /usr/sbin/nologin radixgate \
 && install -d -o radixgate -m 0700 /var/lib/radixgate
COPY --from=build /opt/radixgate /opt/radixgate
COPY config/gateway.yaml /etc/radixgate/gateway.yaml
# a container's loopback reaches nobody: publish the admin port on a private address only
ENV PATH=/opt/radixgate/bin:$PATH PYTHONUNBUFFERED=1 \
    RADIXGATE_LISTEN__HOST=0.0.0.0 RADIXGATE_ADMIN__HOST=0.0.0.0
USER 10001
EXPOSE 8080 9090
# drains: `docker stop -t 40`, or compose's stop_grace_period, above drain_delay_s and drain_s together
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=3s --start-period=5s --retries=3 \
    CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8080/healthz', timeout=2)"]
ENTRYPOINT ["radixgate"]
CMD ["serve", "/etc/radixgate/gateway.yaml"]
