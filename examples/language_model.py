"""Train a small GPT on the characters of text files.

    python examples/language_model.py --data-dir docs --lr 0.003 --batch-size 32 \
        --checkpoint-dir runs/language_model
    TRAIN_SCRIPT=examples/language_model.py scripts/ssh/launch_singlenode.sh \
        configs/default_config.yaml 2 --data-dir docs --lr 0.003 \
        --checkpoint-dir runs/language_model_2

Shows tokens as input, and a loss per token. --data-dir holds .txt or .md files; the last tenth of
their text is the test set. With a directory that holds Tiny Shakespeare, these are the settings of
nanoGPT's shakespeare_char on a CPU (2,000 steps of 12 windows at random positions):
    --windows 24000 --epochs 1 --layers 4 --width 128 --dropout 0 --batch-size 12 --lr 1e-3
    --min-lr-factor 0.1 --warmup-epochs 0.05 --beta2 0.99 --weight-decay 0.1 --clip-grad-norm 1
"""

import math
import sys
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # train_distributed.py is there
from train_distributed import InMemoryDataset, Task, UserError, main  # noqa: E402


class TinyGpt(nn.Module):
    """Characters [b, t], t <= length -> logits of the next ones [b, t, kinds]. After nanoGPT."""

    def __init__(self, kinds: int, length: int, width: int, layers: int, dropout: float):
        super().__init__()
        self.token = nn.Embedding(kinds, width)  # also the matrix of the logits
        self.position = nn.Embedding(length, width)
        options = {"activation": "gelu", "batch_first": True, "norm_first": True, "bias": False}
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout, **options)
        norm = nn.LayerNorm(width, bias=False)
        self.blocks = nn.TransformerEncoder(layer, layers, norm, enable_nested_tensor=False)
        for name, weights in self.named_parameters():
            ends_branch = name.endswith(("out_proj.weight", "linear2.weight"))
            if weights.ndim > 1:
                nn.init.normal_(weights, std=0.02 / math.sqrt(2 * layers if ends_branch else 1))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        length = tokens.shape[1]
        x = self.token(tokens) + self.position.weight[:length]  # [b, t, width]
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=x.device)
        return F.linear(self.blocks(x, mask, is_causal=True), self.token.weight)


class LanguageModel(Task):
    def add_options(self, parser):
        add = parser.add_argument
        add("--length", type=int, default=64, help="characters that it sees [64]")
        add("--layers", type=int, default=2, help="[2]")
        add("--width", type=int, default=64, help="a multiple of its 4 heads [64]")
        add("--dropout", type=float, default=0.1, help="[0.1]")
        add("--windows", type=int, help="at random positions of the text [side by side]")
        add("--beta2", type=float, default=0.999, help="of AdamW [0.999]")
        add("--min-lr-factor", type=float, default=0.0, help="at the end of the schedule [0]")

    def data(self, cfg):
        files = sorted(Path(cfg.data_dir).glob("*.txt")) + sorted(Path(cfg.data_dir).glob("*.md"))
        text = "".join(file.read_text(encoding="utf-8", errors="replace") for file in files)
        if len(text) < 20 * cfg.length:
            raise UserError(
                f"--data-dir {cfg.data_dir} has only {len(text)} characters in *.txt, *.md"
            )
        codes = np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)
        kinds, numbers = np.unique(codes, return_inverse=True)
        self.spec = {"characters": "".join(map(chr, kinds))}
        train, test = torch.from_numpy(numbers).tensor_split([len(text) * 9 // 10])
        # Windows of the inputs and, one further on, of the targets: [n, length + 1]
        windows = train.unfold(0, cfg.length + 1, cfg.length)
        if cfg.windows:
            positions = torch.randint(len(train) - cfg.length, (cfg.windows,))
            windows = train.unfold(0, cfg.length + 1, 1)[positions]
        return InMemoryDataset(windows), InMemoryDataset(test.unfold(0, cfg.length + 1, cfg.length))

    def model(self, cfg):
        kinds = len(self.spec["characters"])
        return TinyGpt(kinds, cfg.length, cfg.width, cfg.layers, cfg.dropout)

    def optimizer(self, cfg, model):
        matrices = [p for p in model.parameters() if p.ndim > 1]
        norms = [p for p in model.parameters() if p.ndim < 2]
        groups = [{"params": matrices}, {"params": norms, "weight_decay": 0.0}]
        options = {"betas": (0.9, cfg.beta2), "weight_decay": cfg.weight_decay}
        return torch.optim.AdamW(groups, lr=cfg.lr, fused=True, **options)

    def lr_factor(self, cfg, step, total_steps):
        factor = super().lr_factor(cfg, step, total_steps)
        is_warmup = step < cfg.warmup_epochs / cfg.epochs * total_steps
        return factor if is_warmup else cfg.min_lr_factor + (1 - cfg.min_lr_factor) * factor

    def loss(self, model, batch):
        (windows,) = batch
        targets = windows[:, 1:]
        logits = model(windows[:, :-1])
        # Flat, because cross_entropy() of more dimensions is not deterministic on a GPU.
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        correct = (logits.argmax(-1) == targets).float().mean(dim=1)
        return loss, {"correct": correct.sum()}

    def report(self, sums):
        values = super().report(sums)
        return values | {"bits_per_character": values["loss"] / math.log(2)}

    def blocks(self, model):
        return list(model.blocks.layers)


if __name__ == "__main__":
    main(LanguageModel())
