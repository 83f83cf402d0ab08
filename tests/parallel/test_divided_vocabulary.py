"""An embedding and a head whose entries are divided among ranks, beside PyTorch's own on one."""

from tests.backend.distributed.ranks import assert_all_ended_well, run_ranks

SCRIPT = """
    import copy
    import torch.nn.functional as F
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor
    from tputrain.models.vocabulary_loss import VocabularyHead
    from tputrain.parallel.tensor_plan import parallelise_layers

    CLASSES, FEATURES = 24, 6

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(CLASSES, FEATURES)
            self.head = VocabularyHead(FEATURES, CLASSES)

        def forward(self, ids, labels=None):
            return self.head(self.table(ids).tanh(), labels)

    torch.manual_seed(0)
    whole = Model()
    with torch.no_grad():
        whole.head.weight.mul_(100)  # exponentials overflow where no maximum is taken off
    ids, labels = torch.randint(0, CLASSES, (3, 5)), torch.randint(0, CLASSES, (3, 5))
    ids[0, :2] = labels[0, :2] = torch.tensor([0, CLASSES - 1])
    labels[1:, 2:] = -100

    logits = whole(ids)
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
    loss.backward()

    mesh = init_device_mesh("tpu", (world,))
    divided = copy.deepcopy(whole).to("tpu")
    divided.zero_grad()
    parallelise_layers(divided, mesh, {"table": "embedding_rowwise", "head": "colwise_gather_output"})

    sizes = []
    linear = F.linear
    F.linear = lambda *args: sizes.append(args[1].shape[0]) or linear(*args)
    found = divided(ids.to("tpu"), labels.to("tpu"))
    F.linear = linear
    assert sizes == [CLASSES // world], sizes
    (2 * found).backward()
    assert found.dtype is torch.float32
    torch.testing.assert_close(found.cpu(), loss, rtol=1e-5, atol=0)
    torch.testing.assert_close(divided(ids.to("tpu")).cpu(), logits, rtol=1e-5, atol=1e-5)
    for (name, own), other in zip(divided.named_parameters(), whole.parameters(), strict=True):
        assert isinstance(own.grad, DTensor) and own.grad.to_local().shape[0] == CLASSES // world, name
        largest = other.grad.abs().max().item()
        found = own.grad.full_tensor().cpu()
        torch.testing.assert_close(found, 2 * other.grad, rtol=1e-5, atol=1e-5 * largest)

    # No label counts: nothing has a gradient, and the loss is what PyTorch says.
    divided.zero_grad()
    none = divided(ids.to("tpu"), torch.full_like(labels, -100).to("tpu"))
    assert none.isnan().item()
    none.backward()
    assert all((each.grad.full_tensor() == 0).all().item() for each in divided.parameters())

    # 16-bit hidden states: the loss is float32.
    with torch.autocast("tpu", torch.bfloat16):
        rough = divided(ids.to("tpu"), labels.to("tpu"))
    assert rough.dtype is torch.float32
    torch.testing.assert_close(rough.cpu(), loss, rtol=0.02, atol=0)

    # Of a class that is no rank's, all ranks are told.
    for number, given in enumerate(
        [(ids + 1, labels), (ids, labels.clamp(min=0) + 1), (ids - 1, labels), (ids, labels - 1)]
    ):
        try:
            divided(*(each.to("tpu") for each in given)).item()
            raise SystemExit(f"call {number} took a class that is not there")
        except IndexError as error:
            assert "out of bounds" in str(error) or "out of range" in str(error), error
    print("done")
    dist.destroy_process_group()
"""


def test_it_gives_the_values_and_gradients_of_whole_ones_and_has_a_part_of_the_logits():
    ranks = run_ranks(SCRIPT, 2, timeout=180)
    assert_all_ended_well(ranks)
    assert all(each.stdout.splitlines()[-1] == "done" for each in ranks)
