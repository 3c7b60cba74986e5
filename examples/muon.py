"""Train the language model with Muon for the matrices of its hidden layers, AdamW for the rest.

    python examples/muon.py --data-dir docs --lr 0.03 --batch-size 32 --checkpoint-dir runs/muon
    TRAIN_SCRIPT=examples/muon.py scripts/ssh/launch_singlenode.sh \
        configs/default_config.yaml 2 --data-dir docs --lr 0.03 --checkpoint-dir runs/muon_2

Shows two optimizers in one, which the checkpoints contain. Needs PyTorch >= 2.9. One --lr is for
both: match_rms_adamw scales Muon's updates to the size of AdamW's (arXiv:2502.16982). Muon:
Jordan et al., https://kellerjordan.github.io/posts/muon/.
"""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # train_distributed.py is there
from examples.language_model import LanguageModel  # noqa: E402
from train_distributed import UserError, main  # noqa: E402


class MuonAdamW(torch.optim.Optimizer):
    """Two optimizers with one state: parameter group 0 is Muon's, group 1 is AdamW's."""

    def __init__(self, matrices: list, others: list, **options):
        muon = torch.optim.Muon(matrices, adjust_lr_fn="match_rms_adamw", **options)
        adamw = torch.optim.AdamW(others, fused=True, **options)
        self.parts = [muon, adamw]
        super().__init__([*muon.param_groups, *adamw.param_groups], defaults={})

    def step(self, closure=None):
        for part, group in zip(self.parts, self.param_groups):
            part.state = self.state  # load_state_dict() replaces both
            part.param_groups = [group]
            part.step()


class MuonLanguageModel(LanguageModel):
    def optimizer(self, cfg, model):
        if not hasattr(torch.optim, "Muon"):
            raise UserError(f"PyTorch {torch.__version__} has no Muon: install 2.9 or newer")
        matrices = [p for p in model.blocks.parameters() if p.ndim == 2]
        others = [p for p in model.blocks.parameters() if p.ndim != 2]
        for part in (model.token, model.position):
            others += part.parameters()
        return MuonAdamW(matrices, others, lr=cfg.lr, weight_decay=cfg.weight_decay)


if __name__ == "__main__":
    main(MuonLanguageModel())
