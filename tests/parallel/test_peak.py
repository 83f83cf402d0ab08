"""Which buffers of a compiled step are in memory when most is."""

from tpu_backend import hlo
from tputrain.planning.peak import Buffer, peak

MiB = 2**20

# An array of f32[262144] is 1 MiB.
PROGRAM = """ENTRY %main (w: f32[262144]) -> f32[262144] {
  %w = f32[262144]{0} parameter(0)
  %up = f32[524288]{0} fusion(%w), calls=%a, metadata={op_name="jit(run)/forward up, a.py:7/dot_general"}
  %up.2 = f32[524288]{0} fusion(%w), calls=%a, metadata={op_name="jit(run)/forward up, a.py:7/dot_general"}
  %onchip = f32[524288]{0:T(1024)S(1)} copy(%up)
  %both = (f32[524288]{0}, f32[524288]{0}) tuple(%up, %up.2)
  %up.3 = f32[524288]{0} get-tuple-element(%both), index=1
  %down = f32[262144]{0} fusion(%up.3, %onchip), calls=%b, \
metadata={op_name="jit(run)/forward down/dot_general"}
  ROOT %new = f32[262144]{0} fusion(%w, %down), calls=%c, metadata={op_name="jit(run)/optimizer/add"}
}
"""


def test_what_is_there_from_its_making_to_its_last_use_is_added_up() -> None:
    found = peak(hlo.program(PROGRAM))
    # Both of 2 MiB: one goes before the other is read. The new weights take the memory of the old ones.
    assert found.num_bytes == 4 * MiB
    assert found.buffers == (Buffer("forward up", "dot_general", "f32[524288]", 2, 4 * MiB, "a.py:7"),)
    assert found.buffers[0].origin == "forward up, a.py:7: dot_general"


LOOP = """%body (p: (f32[262144], s32[])) -> (f32[262144], s32[]) {
  %p = (f32[262144]{0}, s32[]) parameter(0)
  %sums = f32[262144]{0} get-tuple-element(%p), index=0
  %turn = s32[] get-tuple-element(%p), index=1
  %block = f32[1048576]{0} fusion(%sums), kind=kLoop, calls=%a
  %more = f32[262144]{0} fusion(%sums, %block), kind=kLoop, calls=%b
  ROOT %r = (f32[262144]{0}, s32[]) tuple(%more, %turn)
}

ENTRY %main (x: f32[262144], n: s32[]) -> f32[] {
  %x = f32[262144]{0} parameter(0)
  %n = s32[] parameter(1)
  %zeros = f32[262144]{0} broadcast(%x), metadata={op_name="jit(run)/loss/broadcast"}
  %start = (f32[262144]{0}, s32[]) tuple(%zeros, %n)
  %loop = (f32[262144]{0}, s32[]) while(%start), condition=%c, body=%body
  %total = f32[262144]{0} get-tuple-element(%loop), index=0
  ROOT %sum = f32[] reduce(%total), to_apply=%add
}
"""


def test_a_loop_has_its_own_buffers_beside_those_that_it_is_given() -> None:
    found = peak(hlo.program(LOOP))
    assert found.num_bytes == 5 * MiB  # its block of 4 MiB, and the sums, which go through it
    assert found.buffers == (
        Buffer("", "fusion", "f32[1048576]", 1, 4 * MiB),
        Buffer("loss", "broadcast", "f32[262144]", 1, MiB),
    )


CARRIED = """%step (a: f32[262144], g: f32[1048576]) -> f32[1048576] {
  %a = f32[262144]{0} parameter(0)
  %g = f32[1048576]{0} parameter(1)
  ROOT %gather = f32[1048576]{0} all-gather(%a), replica_groups={{0,1,2,3}}, dimensions={0}, \
frontend_attributes={async_collective_name="x",chain_id="3"}
}

ENTRY %main (w: f32[262144]) -> f32[262144] {
  %w = f32[262144]{0} parameter(0)
  %begin = (f32[262144]{0}, f32[1048576]{0}) all-gather-start(%w), replica_groups={{0,1,2,3}}, dimensions={0}
  %whole = f32[1048576]{0} get-tuple-element(%begin), index=1
  %carried = (f32[524288]{0}, f32[1048576]{0}) fusion(%w, %whole), kind=kOutput, calls=%step, \
backend_config={"aliasing_operands":{"lists":[{"indices":["1","3"]}]}}
  %whole.2 = f32[1048576]{0} get-tuple-element(%carried), index=1
  %end = f32[1048576]{0} all-gather-done(%whole.2)
  ROOT %new = f32[262144]{0} fusion(%end), kind=kLoop, calls=%c
}
"""


def test_what_a_collective_fills_is_one_buffer_however_many_instructions_carry_it() -> None:
    found = peak(hlo.program(CARRIED))
    assert found.buffers == (
        Buffer("", "all-gather-start", "f32[1048576]", 1, 4 * MiB),
        Buffer("", "fusion", "f32[524288]", 1, 2 * MiB),
    )


PERMUTED = """ENTRY %main (x: f32[262144]) -> f32[] {
  %x = f32[262144]{0} parameter(0)
  %y = f32[262144]{0} fusion(%x), calls=%a
  %begin = (f32[262144]{0}, f32[262144]{0}, u32[]{:S(2)}, u32[]{:S(2)}) collective-permute-start(%y), \
source_target_pairs={{0,1},{1,0}}
  %there = f32[262144]{0} collective-permute-done(%begin)
  %copying = (f32[262144]{0}, f32[262144]{0}, u32[]{:S(2)}) copy-start(%x)
  %copied = f32[262144]{0} copy-done(%copying)
  ROOT %sum = f32[] fusion(%there, %y, %copied), calls=%b
}
"""


def test_what_has_the_shape_of_its_operand_is_another_buffer() -> None:
    found = peak(hlo.program(PERMUTED))
    assert [(each.operation, each.count) for each in found.buffers] == [
        ("fusion", 1),
        ("collective-permute-start", 1),
        ("copy-start", 1),
    ]


def test_a_product_that_carries_a_gather_is_not_its_operand() -> None:
    """Though they have one shape."""
    program = (
        CARRIED.replace("fusion(%w, %whole), kind=kOutput", "fusion(%rest, %whole), kind=kOutput")
        .replace("  %begin =", "  %rest = f32[524288]{0} fusion(%w), calls=%a\n  %begin =")
        .replace("fusion(%end), kind=kLoop", "fusion(%end, %rest), kind=kLoop")
    )
    found = peak(hlo.program(program))
    assert found.num_bytes == 8 * MiB


IN_PLACE = """ENTRY %main (w: f32[262144]) -> f32[] {
  %w = f32[262144]{0} parameter(0)
  %logits = f32[262144]{0} fusion(%w), calls=%a
  %gradient = f32[262144]{0} fusion(%logits, %w), calls=%b, \
backend_config={"aliasing_operands":{"lists":[{"indices":["0","2"]}]}}
  ROOT %sum = f32[] fusion(%gradient), calls=%c
}
"""


def test_a_result_takes_the_memory_of_an_operand_that_ends_there() -> None:
    found = peak(hlo.program(IN_PLACE))
    assert found.buffers == (Buffer("", "fusion", "f32[262144]", 1, MiB),)
    used_later = IN_PLACE.replace("fusion(%gradient)", "fusion(%gradient, %logits)")
    assert peak(hlo.program(used_later)).num_bytes == 2 * MiB
    not_allowed = IN_PLACE.replace('["0","2"]', "")
    assert peak(hlo.program(not_allowed)).num_bytes == 2 * MiB
