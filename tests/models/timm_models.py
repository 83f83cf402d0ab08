"""Tiny image classifiers of timm's families."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Generator, nn

from tests.models.case import Batch, Case, WithLoss
from tests.models.timm_import import import_timm

SIDE, CLASSES = 32, 5
TRANSFORMER = {"img_size": SIDE, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 4}
MIXER = {"num_classes": CLASSES, "img_size": SIDE, "patch_size": 8, "embed_dim": 32, "num_blocks": 2}


def _images(count: int, side: int, generator: Generator) -> Batch:
    target = torch.randint(0, CLASSES, (count,), generator=generator)
    return {"x": torch.randn(count, 3, side, side, generator=generator), "target": target}


def images(generator: Generator) -> Batch:
    return _images(4, SIDE, generator)


def images_for_batch_norm(generator: Generator) -> Batch:
    """More and larger images: the last batch norms would see four numbers each of the others, and float32 on
    the CPU itself is then 0.2 % away from float64 after three steps.
    """
    return _images(8, 2 * SIDE, generator)


def _case(
    name: str, make: Callable[[ModuleType], nn.Module], batch: Callable[[Generator], Batch] = images
) -> Case:
    def model() -> nn.Module:
        return WithLoss(_without_dropout(make(import_timm())), F.cross_entropy)

    return Case(f"timm {name}", "timm", model, batch)


def _without_dropout(model: nn.Module) -> nn.Module:
    """The model with every probability of dropping a number or a path set to 0."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        elif hasattr(module, "drop_prob"):  # timm's DropPath
            module.drop_prob = 0.0
    return model


def _named(name: str, batch: Callable[[Generator], Batch] = images, **settings: Any) -> Case:
    """A model that timm's factory makes, most of them shrunk by the settings."""
    return _case(name, lambda timm: timm.create_model(name, num_classes=CLASSES, **settings), batch)


def _mixer(timm: ModuleType) -> nn.Module:
    return timm.models.MlpMixer(**MIXER)


def _gmlp(timm: ModuleType) -> nn.Module:
    block = timm.models.mlp_mixer.SpatialGatingBlock
    return timm.models.MlpMixer(**MIXER, block_layer=block, mlp_layer=timm.layers.GatedMlp, mlp_ratio=2)


def _regnet(timm: ModuleType) -> nn.Module:
    # The stages' widths follow from these numbers: 8, 16, 32 and 64.
    shape = timm.models.regnet.RegNetCfg(
        depth=6, w0=8, wa=10.0, wm=2.0, group_size=4, stem_width=8, se_ratio=0.25
    )
    return timm.models.RegNet(shape, num_classes=CLASSES)


CASES = (
    _named("resnet18", images_for_batch_norm, channels=(8, 8, 16, 16), layers=(1, 1, 1, 1), stem_width=8),
    _named("resnetv2_50", channels=(16, 32), layers=(1, 1), stem_chs=8),
    _named("densenet121", images_for_batch_norm, growth_rate=8, block_config=(2, 2)),
    _named("test_efficientnet", images_for_batch_norm),
    _named("mobilenetv3_small_050", images_for_batch_norm),
    _case("regnet", _regnet, images_for_batch_norm),
    _named("convnext_atto", depths=(1, 1, 1, 1), dims=(8, 8, 16, 16)),
    _named("edgenext_xx_small", depths=(1, 1, 1, 1), dims=(8, 16, 16, 32)),
    _named("fastvit_t8", images_for_batch_norm, layers=(1, 1, 1, 1), embed_dims=(8, 16, 16, 32)),
    _named("vit_tiny_patch16_224", **TRANSFORMER),
    _named("deit3_small_patch16_224", **TRANSFORMER),
    _named("beit_base_patch16_224", **TRANSFORMER),
    _named("cait_xxs24_224", **TRANSFORMER),
    _named("eva02_tiny_patch14_224", **TRANSFORMER),
    _named("swin_tiny_patch4_window7_224", img_size=SIDE, window_size=4, patch_size=4, embed_dim=16,
           depths=(1, 1), num_heads=(2, 4)),
    _named("pvt_v2_b0", depths=(1, 1, 1, 1), embed_dims=(8, 16, 16, 32), num_heads=(1, 2, 2, 4)),
    _case("mlp-mixer", _mixer),
    _case("gmlp", _gmlp),
)  # fmt: skip
