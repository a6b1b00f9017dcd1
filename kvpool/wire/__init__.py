"""HOW the control plane is spelled: gRPC clients and servers of plain values; generated protobuf stays inside this room."""
