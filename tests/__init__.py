import os

# The event loop forks to start the processes that tests need. gRPC is to make nothing of it, and
# must hear so before it is imported.
os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "false"
