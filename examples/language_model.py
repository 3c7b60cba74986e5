"""Train a small GPT on the bytes of text files.

    python examples/language_model.py --data-dir docs --optimizer adamw --lr 0.003 \
        --batch-size 32 --checkpoint-dir runs/language_model
    TRAIN_SCRIPT=examples/language_model.py scripts/ssh/launch_singlenode.sh \
        configs/default_config.yaml 2 --data-dir docs --optimizer adamw --lr 0.003 \
        --checkpoint-dir runs/language_model_2

Shows tokens as input, a loss per token, and other metrics. --data-dir holds .txt or .md files; the
last tenth of their text is the test set.
"""

import math
import sys
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # train_distributed.py is there
from train_distributed import InMemoryDataset, Task, UserError, main  # noqa: E402

LENGTH = 64  # tokens that the model sees


class TinyGpt(nn.Module):
    """Bytes [b, t], t <= LENGTH -> logits of the next bytes [b, t, 256]."""

    def __init__(self, width: int = 64, layers: int = 2):
        super().__init__()
        self.token = nn.Embedding(256, width)
        self.position = nn.Embedding(LENGTH, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, 256)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        length = tokens.shape[1]
        x = self.token(tokens.long()) + self.position.weight[:length]  # [b, t, width]
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=x.device)
        return self.head(self.blocks(x, mask, is_causal=True))


class LanguageModel(Task):
    def add_options(self, parser):
        pass  # none of the options of Task

    def data(self, cfg):
        files = sorted(Path(cfg.data_dir).glob("*.txt")) + sorted(Path(cfg.data_dir).glob("*.md"))
        text = b"".join(file.read_bytes() for file in files)
        if len(text) < 20 * LENGTH:
            raise UserError(f"--data-dir {cfg.data_dir} has only {len(text)} bytes in *.txt, *.md")
        all_bytes = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        pieces = all_bytes.unfold(0, LENGTH + 1, LENGTH)  # the last byte of one begins the next
        train = len(pieces) * 9 // 10
        return InMemoryDataset(pieces[:train]), InMemoryDataset(pieces[train:])

    def model(self, cfg):
        return TinyGpt()

    def loss(self, model, batch):
        (pieces,) = batch  # [b, LENGTH + 1]
        targets = pieces[:, 1:].long()
        logits = model(pieces[:, :-1])
        # Flat, because cross_entropy() of more dimensions is not deterministic on a GPU.
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return loss, {"correct": (logits.argmax(-1) == targets).sum()}

    def report(self, sums):
        loss = sums["loss"] / sums["count"]
        accuracy = sums["correct"] / (sums["count"] * LENGTH)  # "count" is of the pieces
        return {"loss": loss, "bits_per_byte": loss / math.log(2), "accuracy": accuracy}

    def blocks(self, model):
        return list(model.blocks.layers)


if __name__ == "__main__":
    main(LanguageModel())
