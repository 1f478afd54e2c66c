"""What the tests share: the control plane, pods with simulated engines, routers and their clients."""
