"""Topologies by name, and how their chips are linked."""

import pytest

from tputrain.errors import UserError
from tputrain.parallel.topology import CHIPS, Topology, shapes


@pytest.mark.parametrize(
    ("text", "name", "chips", "hosts"),
    [
        ("v6e:16x16", "v6e:16x16", 256, 64),
        ("v6e-8", "v6e:2x4", 8, 1),
        ("v5litepod-16", "v5e:4x4", 16, 4),
        ("v5p-128", "v5p:4x4x4", 64, 16),  # cores
        ("v4-8", "v4:2x2x1", 4, 1),
        ("2x v5e:16x16", "2x v5e:16x16", 512, 128),
        ("3xv5p:8x4x4", "3x v5p:4x4x8", 384, 96),
        ("ironwood:4x4x4", "tpu7x:4x4x4", 64, 16),
        ("v6e: 2x2", "v6e:2x2", 4, 1),
        ("2 x v5e : 16 x 16", "2x v5e:16x16", 512, 128),
    ],
)
def test_topologies_have_the_names_that_users_write(text: str, name: str, chips: int, hosts: int) -> None:
    found = Topology.parse(text)
    assert (found.name, found.num_chips, found.num_hosts) == (name, chips, hosts)
    assert Topology.parse(found.name) == found


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("v7e-8", "no TPU is called v7e .*did you mean"),
        ("v6e:16x17", "no slice of that shape; nearest: v6e:16x16 and v6e:8x16"),
        ("v5p-100", "no slice of 100 cores; nearest: v5p-64 and v5p-128"),
        ("v6e", "expected a slice such as v6e:16x16"),
        ("v5p128", r"'v5p128': did you mean v5p-128\?"),
        ("v6e16x16", r"did you mean v6e:16x16\?"),
        ("V6E-16x16", r"did you mean v6e:16x16\?"),
        ("2x v5e 16*16", r"did you mean 2x v5e:16x16\?"),
        ("tpu7x4x4x4", r"did you mean tpu7x:4x4x4\?"),
        ("v5p130", "v5p has no slice of 130 cores; nearest: v5p-64 and v5p-128"),
        ("0x v6e:4x4", "expected at least one slice"),
        ("v6e:4xx4", "expected a slice"),
        ("v6e:1 6x16", "expected a slice"),
    ],
)
def test_an_unknown_topology_is_refused_with_the_nearest(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        Topology.parse(text)


@pytest.mark.parametrize(
    ("text", "wraps"),
    [
        ("v6e:16x16", [True, True]),
        ("v6e:8x16", [False, True]),
        ("v5e:4x4", [False, False]),
        ("v5p:4x4x4", [True, True, True]),
        ("v5p:2x4x4", [False, False, False]),
    ],
)
def test_axes_wrap_where_the_pod_links_their_ends(text: str, wraps: list[bool]) -> None:
    assert [axis.wraps for axis in Topology.parse(text).axes] == wraps


def test_every_shape_of_every_chip_is_its_own_name() -> None:
    for chip in CHIPS.values():
        for shape in shapes(chip):
            assert Topology.parse(Topology(chip, shape).name).shape == shape
