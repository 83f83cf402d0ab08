"""Operators made of others on the device (composite/, composites.cpp), and copies that resolve lazy bits."""

import pytest
import torch
import torch.nn.functional as F

pytestmark = pytest.mark.usefixtures("no_fallback")

MATRIX = torch.tensor([[4.0, 1.0, -2.0], [0.5, -3.0, 1.5], [2.0, 0.25, 5.0]])


def gradients(function, *leaves):
    """The results of a function of leaves and the gradients of their sum."""
    leaves = [leaf.detach().requires_grad_() for leaf in leaves]
    results = function(*leaves)
    total = sum(result.sum() for result in results)
    return [value.detach().cpu() for value in (*results, *torch.autograd.grad(total, leaves))]


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(
    "function",
    [
        lambda a, b: (torch.linalg.det(a * b[0]),),
        lambda a, b: torch.linalg.slogdet(a * b[0]),
        lambda a, b: (torch.linalg.solve(a, b),),
        lambda a, b: (torch.linalg.solve(a, b[:, None] * torch.ones_like(a), left=False),),
    ],
    ids=["det", "slogdet", "solve", "solve_right"],
)
def test_lu_and_its_derivatives_whatever_the_memory_order(function, transposed: bool) -> None:
    right = torch.tensor([1.0, -2.0, 0.5])
    matrix = MATRIX.t().contiguous().t() if transposed else MATRIX
    on_device = matrix.to("tpu")
    assert on_device.is_contiguous() != transposed
    torch.testing.assert_close(
        gradients(function, on_device, right.to("tpu")), gradients(function, matrix, right)
    )


def ctc(device: str, targets, input_lengths, target_lengths, reduction="none", **options):
    torch.manual_seed(0)
    scores = torch.randn(9, 3, 5).log_softmax(-1).to(device)
    return gradients(
        lambda log_probs: (
            F.ctc_loss(
                log_probs, targets.to(device), input_lengths, target_lengths, reduction=reduction, **options
            ),
        ),
        scores,
    )


TARGETS = torch.tensor([[1, 1, 2], [3, 4, 3], [2, 0, 0]])


@pytest.mark.parametrize(
    ("targets", "input_lengths", "target_lengths", "options"),
    [
        (TARGETS, (9, 8, 6), (3, 2, 1), {}),
        (torch.tensor([1, 1, 2, 3, 4, 2]), (9, 8, 6), (3, 2, 1), {}),  # one after the other
        (TARGETS, (9, 8, 6), (3, 0, 1), {"blank": 0}),
        (TARGETS, (3, 8, 2), (3, 2, 1), {"zero_infinity": True}),  # 1 1 2 needs four steps
        (torch.tensor([[1, 1], [2, 3], [2, 3]]), (9, 8, 6), (2, 2, 1), {"blank": 4}),
    ],
)
def test_ctc_loss(targets, input_lengths, target_lengths, options) -> None:
    torch.testing.assert_close(
        ctc("tpu", targets, input_lengths, target_lengths, **options),
        ctc("cpu", targets, input_lengths, target_lengths, **options),
    )


def test_the_gradient_of_ctc_loss_on_long_sequences_is_rounded_like_the_cpus() -> None:
    """Log probabilities near -150 are 1.5e-5 apart: any other order of the sums, or exp or log, shows."""

    def gradient(device: str) -> torch.Tensor:
        generator = torch.Generator().manual_seed(0)
        log_probs = torch.randn(50, 16, 20, generator=generator).log_softmax(-1)
        labels = torch.randint(1, 20, (16, 30), generator=generator).to(device)
        lengths = torch.full((16,), 50), torch.randint(10, 30, (16,), generator=generator)
        return gradients(lambda leaf: (F.ctc_loss(leaf, labels, *lengths),), log_probs.to(device))[1]

    torch.testing.assert_close(gradient("tpu"), gradient("cpu"), rtol=0, atol=1e-6)


def test_the_lengths_of_ctc_loss_compile_nothing() -> None:
    ctc("tpu", TARGETS, (9, 8, 6), (3, 2, 1))
    before = torch.tpu.compile_stats()["compilations"]
    for lengths in ((9, 9, 9), (7, 8, 5), (6, 6, 9)):
        ctc("tpu", TARGETS, lengths, (3, 1, 2))
    assert torch.tpu.compile_stats()["compilations"] == before


@pytest.mark.parametrize("lengths", [((9, 8), (3, 2, 1)), ((9, 8, 60), (3, 2, 1)), ((9, 8, 6), (3, 2, 9))])
def test_lengths_that_cannot_be_are_refused(lengths) -> None:
    with pytest.raises(RuntimeError, match="_lengths"):
        ctc("tpu", TARGETS, *lengths)


def test_copies_resolve_lazy_bits() -> None:
    values = torch.tensor([1 + 2j, -3 + 0.5j])
    on_device = values.to("tpu")
    assert torch.equal(on_device.conj().clone().cpu(), values.conj().resolve_conj())
    assert torch.equal(on_device.conj().imag.clone().cpu(), -values.imag)
    assert torch.equal(on_device.conj().cpu().resolve_conj(), values.conj().resolve_conj())
    assert torch.equal(values.conj().to("tpu").cpu().resolve_conj(), values.conj().resolve_conj())
    target = torch.zeros(2, dtype=torch.complex64, device="tpu")
    target.conj().copy_(on_device)
    assert torch.equal(target.cpu(), values.conj().resolve_conj())


def test_gradients_through_complex_numbers() -> None:
    size, angle = torch.tensor([1.0, 2.0]), torch.tensor([0.3, -1.0])

    def spectrum(size, angle):
        return (torch.view_as_real(torch.fft.ifft(torch.polar(size, angle))),)

    torch.testing.assert_close(
        gradients(spectrum, size.to("tpu"), angle.to("tpu")), gradients(spectrum, size, angle)
    )


def test_results_go_into_out() -> None:
    x = torch.arange(12.0, device="tpu").reshape(3, 4)
    out = torch.empty(0, device="tpu")
    torch.narrow_copy(x, 1, 1, 2, out=out)
    assert torch.equal(out.cpu(), x.cpu()[:, 1:3])
    mean, outputs = torch.zeros(4, device="tpu"), [torch.empty(0, device="tpu") for _ in range(3)]
    torch.native_batch_norm(
        x, None, None, mean, torch.ones(4, device="tpu"), True, 0.5, 1e-5, out=tuple(outputs)
    )
    torch.testing.assert_close(outputs[0].cpu(), F.batch_norm(x.cpu(), None, None, training=True))
    torch.testing.assert_close(mean.cpu(), x.cpu().mean(0) / 2)


@pytest.mark.parametrize("norm_first", [False, True])
def test_an_encoder_in_evaluation_takes_a_padded_batch(norm_first: bool) -> None:
    """The CPU's fast path has zeros in the padding; here stands what attention gives there."""
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, norm_first=norm_first)
    encoder = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=not norm_first).eval()
    batch, padding = torch.randn(2, 5, 8), torch.tensor([[False] * 3 + [True] * 2, [False] * 5])
    causal = torch.nn.Transformer.generate_square_subsequent_mask(5)
    for masks in ({"src_key_padding_mask": padding}, {"mask": causal}, {}):
        on_device = {name: mask.to("tpu") for name, mask in masks.items()}
        with torch.no_grad():
            expected = encoder.cpu()(batch, **masks)
            result = encoder.to("tpu")(batch.to("tpu"), **on_device).cpu()
        kept = ~padding if "src_key_padding_mask" in masks else torch.ones_like(padding)
        torch.testing.assert_close(result[kept], expected[kept])


@pytest.mark.parametrize("average", [False, True])
def test_attention_in_evaluation(average: bool) -> None:
    torch.manual_seed(0)
    attention = torch.nn.MultiheadAttention(8, 2, batch_first=True).eval()
    batch, padding = torch.randn(2, 5, 8), torch.tensor([[False] * 3 + [True] * 2, [False] * 5])
    with torch.no_grad():
        expected = attention(batch, batch, batch, padding, average_attn_weights=average)
        moved = batch.to("tpu")
        results = attention.to("tpu")(moved, moved, moved, padding.to("tpu"), average_attn_weights=average)
    for result, theirs in zip(results, expected, strict=True):
        torch.testing.assert_close(result.cpu(), theirs)


def test_an_inverse_of_what_is_not_finite_is_no_singular_matrix() -> None:
    broken = torch.eye(3).index_put((torch.tensor(0), torch.tensor(1)), torch.tensor(torch.nan))
    assert torch.linalg.inv(broken.to("tpu")).isnan().any()
    sign, logarithm = torch.linalg.slogdet(broken.to("tpu"))
    assert (sign.item(), logarithm.isnan().item()) == (0.0, True)
    with pytest.raises(torch.linalg.LinAlgError, match="The diagonal element 2 is zero"):
        torch.linalg.inv(torch.eye(3, device="tpu").index_fill(0, torch.tensor(1, device="tpu"), 0))


def test_integers_are_shifted_in_place() -> None:
    def shifted(device: str) -> torch.Tensor:
        numbers = torch.tensor([3, -7, 1], dtype=torch.int32, device=device)
        numbers <<= 2
        numbers >>= torch.tensor([1, 3, 40], device=device)
        return numbers

    torch.testing.assert_close(shifted("tpu").cpu(), shifted("cpu"), rtol=0, atol=0)


@pytest.mark.parametrize("name", ["addcdiv", "addcmul"])
def test_a_scalar_for_each_tensor_of_a_list_comes_in_a_tensor_on_the_cpu(name: str) -> None:
    lists = [[torch.rand(size) + 0.5 for size in (3, 4)] for _ in range(3)]
    scalars = torch.tensor([0.5, -2.0])
    on_device = [[tensor.to("tpu") for tensor in each] for each in lists]
    function, in_place = getattr(torch, f"_foreach_{name}"), getattr(torch, f"_foreach_{name}_")
    expected = function(*lists, scalars)
    found = function(*on_device, scalars)
    in_place(*on_device, scalars)
    for want, got, written in zip(expected, found, on_device[0], strict=True):
        torch.testing.assert_close(got.cpu(), want)
        assert torch.equal(written.cpu(), got.cpu())
    with pytest.raises(RuntimeError, match="Expected scalars to be on CPU, got tpu:0"):
        function(*on_device, scalars.to("tpu"))


@pytest.mark.parametrize(("mask_type", "mask_shape"), [(0, (5, 5)), (1, (2, 5)), (2, (2, 3, 5, 5))])
def test_masked_softmax(mask_type: int, mask_shape: tuple[int, ...]) -> None:
    scores, mask = torch.randn(2, 3, 5, 5), torch.rand(mask_shape) > 0.6
    mask[-1] = True  # all of it
    expected = torch._masked_softmax(scores, mask, 3, mask_type)
    found = torch._masked_softmax(scores.to("tpu"), mask.to("tpu"), 3, mask_type)
    torch.testing.assert_close(found.cpu(), expected, equal_nan=True)


def test_conj_physical_in_place_and_into_a_result() -> None:
    value = torch.tensor([1 + 2j, -3j])
    on_device, out = value.to("tpu"), torch.empty(2, dtype=value.dtype, device="tpu")
    torch.conj_physical(on_device, out=out)
    assert torch.equal(out.cpu(), value.conj_physical())
    assert torch.equal(on_device.conj_physical_().cpu(), value.conj_physical())


def test_masked_softmax_refuses_what_the_cpu_refuses() -> None:
    scores = torch.randn(2, 3, 5, 4, device="tpu")
    with pytest.raises(RuntimeError):
        torch._masked_softmax(scores, torch.zeros(2, 4, dtype=torch.bool, device="tpu"), 3, 1)
    with pytest.raises(NotImplementedError):
        torch._masked_softmax(scores.long(), torch.zeros_like(scores, dtype=torch.bool), 3, 2)


@pytest.mark.parametrize("power", [True, False, 2, 0.5])
def test_powers_of_truth_values(power: float) -> None:
    truth = torch.tensor([True, False])
    on_device = truth.to("tpu")
    for found, expected in (
        (on_device**power, truth**power),
        (torch._foreach_pow([on_device], power)[0], torch._foreach_pow([truth], power)[0]),
    ):
        assert found.dtype == expected.dtype
        assert torch.equal(found.cpu(), expected)
    for function in (lambda base: base**base, lambda base: True**base):
        for base in (truth, on_device):
            with pytest.raises(NotImplementedError, match="\"pow\" not implemented for 'Bool'"):
                function(base)
