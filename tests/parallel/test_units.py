"""Which parts of a model FSDP divides one by one."""

from torch import nn

from tputrain.models.vocabulary_loss import VocabularyHead
from tputrain.parallel.apply import _heads


class Ids(nn.Module):
    """Shares a head's weights, and is no embedding."""

    def __init__(self, head: nn.Module):
        super().__init__()
        self.weight = head.weight


def test_heads_of_their_own_are_units() -> None:
    def model(**parts: nn.Module) -> nn.Module:
        made = nn.Module()
        for name, part in parts.items():
            setattr(made, name, part)
        return made

    head = VocabularyHead(4, 6)
    assert _heads(model(body=nn.Linear(4, 4), head=head)) == [head]
    assert _heads(model(nested=model(head=head))) == [head]
    assert _heads(model(head=head, ids=Ids(head))) == []  # tied
    assert _heads(model(layers=nn.ModuleList([head, VocabularyHead(4, 6)]))) == []  # units already
    assert _heads(head) == []
    assert _heads(model(head=nn.Linear(4, 6))) == []  # it may be read without being called
