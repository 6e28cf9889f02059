"""A process group is left after the graphs that hold its collectives."""

from __future__ import annotations

from torch import distributed, nn
from torch.distributed.fsdp import fully_shard

from dpbench.instruments.logical.one_rank import fake_process_group
from dpbench.training.parallel import GRAPHS, kind_of, leave_group, mesh_of_all


class Graph:
    """Notes whether its process group was there when it ended."""

    ended: bool | None = None

    def reset(self) -> None:
        self.ended = distributed.is_initialized()


def test_graphs_end_before_their_process_group() -> None:
    graph = Graph()
    GRAPHS.add(graph)
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    leave_group()
    assert graph.ended
    assert not distributed.is_initialized()


def test_the_class_of_a_layer_is_that_which_it_had_before_fsdp2() -> None:
    with fake_process_group(2):
        layer = nn.Linear(2, 2)
        fully_shard(layer, mesh=mesh_of_all("cpu"))
        assert type(layer) is not nn.Linear
        assert kind_of(layer) is nn.Linear
