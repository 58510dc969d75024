"""A Ray of one node with one CPU, and of two when a line comes in: says its address, then that the other is there."""

from __future__ import annotations

import sys

from ray.cluster_utils import Cluster


def main() -> None:
    """Until the input ends."""
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    print(cluster.address, flush=True)
    if sys.stdin.readline():
        cluster.add_node(num_cpus=1)
        print("two", flush=True)
        sys.stdin.read()
    cluster.shutdown()


if __name__ == "__main__":
    main()
