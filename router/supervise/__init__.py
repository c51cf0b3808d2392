"""Several router processes behind one port. Knows no gRPC and loads none: it only starts them."""
