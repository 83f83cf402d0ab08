"""Classic nets, written as scripts write them."""

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from tests.models.case import Batch, Case, WithLoss

BATCH, CLASSES = 4, 5


class Recurrent(nn.Module):
    """Embedding, two recurrent layers, the last state classified."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, 16)
        self.layers = kind(16, 16, num_layers=2, batch_first=True)
        self.head = nn.Linear(16, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        outputs, _ = self.layers(self.embedding(tokens))
        return self.head(outputs[:, -1])


def lstm() -> nn.Module:
    return WithLoss(Recurrent(nn.LSTM), F.cross_entropy)


def gru() -> nn.Module:
    return WithLoss(Recurrent(nn.GRU), F.cross_entropy)


def sequences(generator: Generator) -> Batch:
    tokens = torch.randint(0, 32, (BATCH, 6), generator=generator)
    return {"tokens": tokens, "target": torch.randint(0, CLASSES, (BATCH,), generator=generator)}


class Convolutional(nn.Module):
    """Convolution, batch norm, pooling, twice, and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.AdaptiveAvgPool2d(1),
            nn.Flatten(), nn.Linear(16, CLASSES),
        )  # fmt: skip

    def forward(self, images: Tensor) -> Tensor:
        return self.layers(images)


def convolutional() -> nn.Module:
    return WithLoss(Convolutional(), F.cross_entropy)


def images(generator: Generator) -> Batch:
    pixels = torch.randn(BATCH, 3, 16, 16, generator=generator)
    return {"images": pixels, "target": torch.randint(0, CLASSES, (BATCH,), generator=generator)}


class UNet(nn.Module):
    """Down, up by a transposed convolution, and by interpolation; skips are concatenated."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Conv2d(3, 8, 3, padding=1)
        self.down1 = nn.Conv2d(8, 16, 3, stride=2, padding=1)
        self.down2 = nn.Conv2d(16, 16, 3, stride=2, padding=1)
        self.norm = nn.GroupNorm(4, 16)
        self.up1 = nn.ConvTranspose2d(16, 16, 2, stride=2)
        self.up2 = nn.Conv2d(32, 8, 3, padding=1)
        self.leave = nn.Conv2d(16, CLASSES, 1)

    def forward(self, images: Tensor) -> Tensor:
        whole = F.silu(self.enter(images))
        half = F.silu(self.down1(whole))
        quarter = F.silu(self.norm(self.down2(half)))
        half = torch.cat([half, self.up1(quarter)], dim=1)
        enlarged = F.interpolate(half, scale_factor=2, mode="bilinear", align_corners=False)
        return self.leave(torch.cat([whole, self.up2(enlarged)], dim=1))


def unet() -> nn.Module:
    return WithLoss(UNet(), F.cross_entropy)


def segmented_images(generator: Generator) -> Batch:
    target = torch.randint(0, CLASSES, (BATCH, 16, 16), generator=generator)
    return {"images": torch.randn(BATCH, 3, 16, 16, generator=generator), "target": target}


class DLRM(nn.Module):
    """Bags of categories and dense features, every pair of their vectors multiplied, a click predicted."""

    def __init__(self, tables: int = 3, width: int = 8) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(32, width, mode="sum") for _ in range(tables))
        self.bottom = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, width))
        pairs = (tables + 1) * tables // 2
        self.top = nn.Sequential(nn.Linear(width + pairs, 16), nn.ReLU(), nn.Linear(16, 1))
        self.register_buffer("pairs", torch.tril_indices(tables + 1, tables + 1, offset=-1))

    def forward(self, dense: Tensor, categories: Tensor) -> Tensor:
        bottom = self.bottom(dense)
        bags = [table(ids) for table, ids in zip(self.tables, categories.unbind(1), strict=True)]
        vectors = torch.stack([bottom, *bags], dim=1)
        products = torch.bmm(vectors, vectors.transpose(1, 2))
        crossed = products[:, self.pairs[0], self.pairs[1]]
        return self.top(torch.cat([bottom, crossed], dim=1)).squeeze(1)


def dlrm() -> nn.Module:
    return WithLoss(DLRM(), F.binary_cross_entropy_with_logits)


def clicks(generator: Generator) -> Batch:
    return {
        "dense": torch.randn(BATCH, 4, generator=generator),
        "categories": torch.randint(0, 32, (BATCH, 3, 2), generator=generator),
        "target": torch.randint(0, 2, (BATCH,), generator=generator).float(),
    }


class GraphNet(nn.Module):
    """Messages along edges: added by index_add, their maximum by scatter_reduce, their mean by degree."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.enter = nn.Linear(6, width)
        self.message = nn.Linear(2 * width, width)
        self.update = nn.Linear(4 * width, width)
        self.leave = nn.Linear(width, CLASSES)

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        h = self.enter(nodes)
        source, target = edges
        messages = F.relu(self.message(torch.cat([h[source], h[target]], dim=1)))
        zeros = torch.zeros_like(h)
        total = zeros.index_add(0, target, messages)
        degree = torch.zeros(h.shape[0], device=h.device).scatter_add_(
            0, target, torch.ones_like(messages[:, 0])
        )
        largest = zeros.scatter_reduce(0, target[:, None].expand_as(messages), messages, "amax")
        mean = total / degree.clamp(min=1)[:, None]
        return self.leave(F.relu(self.update(torch.cat([h, total, largest, mean], dim=1))))


def graph_net() -> nn.Module:
    return WithLoss(GraphNet(), F.cross_entropy)


def graph(generator: Generator) -> Batch:
    return {
        "nodes": torch.randn(10, 6, generator=generator),
        "edges": torch.randint(0, 10, (2, 24), generator=generator),
        "target": torch.randint(0, CLASSES, (10,), generator=generator),
    }


CASES = (
    Case("LSTM", "classic", lstm, sequences),
    Case("GRU", "classic", gru, sequences),
    Case("convolutional net", "classic", convolutional, images),
    Case("U-Net", "classic", unet, segmented_images),
    Case("DLRM", "classic", dlrm, clicks),
    Case("graph net", "classic", graph_net, graph),
)
