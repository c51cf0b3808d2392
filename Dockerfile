# Builds the wheel, the wire code generated from proto/ included.
FROM python:3.11-slim AS builder
WORKDIR /src
COPY pyproject.toml README.md ./
COPY proto ./proto
COPY scripts/build_wire.py ./scripts/build_wire.py
COPY router ./router
COPY workers ./workers
RUN python -m venv /opt/mmrouter \
    && /opt/mmrouter/bin/pip install --no-cache-dir .

FROM python:3.11-slim
RUN useradd --system --uid 10001 --create-home --home-dir /var/lib/mmrouter mmrouter
COPY --from=builder /opt/mmrouter /opt/mmrouter
# Compiled kernels are kept where the user may write.
ENV PATH=/opt/mmrouter/bin:$PATH \
    NUMBA_CACHE_DIR=/var/lib/mmrouter/numba \
    MMROUTER_LISTEN=0.0.0.0:50050 \
    MMROUTER_HTTP=0.0.0.0:9090 \
    PYTHONUNBUFFERED=1
USER 10001
WORKDIR /var/lib/mmrouter
# For processors like the one that builds the image; others compile at their first start.
RUN python -m router.kernels
EXPOSE 50050 9090
HEALTHCHECK --interval=10s --timeout=3s --start-period=30s \
    CMD ["mmrouter", "health", "--addr", "127.0.0.1:50050"]
ENTRYPOINT ["mmrouter"]
CMD ["serve"]
