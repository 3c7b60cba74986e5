"""Fine-tune a Hugging Face model that classifies texts.

    pip install transformers
    python examples/huggingface_text.py --write-sample --data-dir data/reviews --lr 0.01 \
        --checkpoint-dir runs/huggingface_text
    TRAIN_SCRIPT=examples/huggingface_text.py scripts/ssh/launch_singlenode.sh \
        configs/default_config.yaml 2 --write-sample --data-dir data/reviews --lr 0.01 \
        --checkpoint-dir runs/huggingface_text_2

Shows padding to the longest text of a batch, rounded up so that --compile compiles few shapes.
--data-dir holds train.jsonl and test.jsonl, lines like {"text": "not bad", "label": "good"}.
--pretrained takes a directory or a name such as bert-base-uncased; else, a small BERT reads bytes.
"""

import argparse
import json
import random
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # train_distributed.py is there
from train_distributed import Task, UserError, main  # noqa: E402

PADDING = {"padding": True, "pad_to_multiple_of": 64, "truncation": True, "max_length": 256}
SMALL = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}


def import_transformers():
    try:
        import transformers
    except ImportError as error:
        raise UserError(f"{error}: pip install transformers") from None
    return transformers


def write_sample(root: Path, train: int = 1000, test: int = 200) -> None:
    root.mkdir(parents=True)
    for part, samples in (("train", train), ("test", test)):
        with (root / f"{part}.jsonl").open("w") as file:
            for label in ["bad", "good"] * (samples // 2):
                words = random.choices(["what", "a", "film", label], k=random.randint(1, 20))
                print(json.dumps({"text": " ".join([*words, label]), "label": label}), file=file)


def read_texts(path: Path) -> list[tuple[str, str]]:
    try:
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        return [(str(row["text"]), str(row["label"])) for row in rows]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"cannot read texts and labels in {path} ({error!r})") from None


class TextClassifier(Task):
    pretrained = None  # data() sets it: load_model() needs no pretrained weights

    def add_options(self, parser):
        switch = argparse.BooleanOptionalAction
        parser.add_argument("--pretrained", help="a directory or a name [a small BERT, random]")
        parser.add_argument("--write-sample", action=switch, help="to --data-dir, if it is new")

    def data(self, cfg):
        root = Path(cfg.data_dir)
        if cfg.write_sample and not root.exists():
            write_sample(root)
        train, test = read_texts(root / "train.jsonl"), read_texts(root / "test.jsonl")
        classes = sorted({label for _, label in train + test})
        self.pretrained = cfg.pretrained
        transformers = import_transformers()
        if cfg.pretrained:
            try:
                self.tokenizer = transformers.AutoTokenizer.from_pretrained(cfg.pretrained)
                config = transformers.AutoConfig.from_pretrained(cfg.pretrained)
            except (OSError, ValueError) as error:
                raise UserError(f"cannot load --pretrained {cfg.pretrained} ({error})") from None
        else:
            self.tokenizer = transformers.ByT5Tokenizer()  # bytes: it needs no vocabulary
            config = transformers.BertConfig(vocab_size=len(self.tokenizer), **SMALL)
        config.num_labels = len(classes)
        config.problem_type = "single_label_classification"  # else set, and compiled, in a step
        self.spec = {"classes": classes, "config": config.to_diff_dict()}
        del self.spec["config"]["transformers_version"]  # a newer one may resume the run
        return train, test

    def loader_options(self):
        return {"collate_fn": self.encode}

    def encode(self, samples: list[tuple[str, str]]) -> dict[str, torch.Tensor]:
        """{"input_ids": int64 [b, t], "attention_mask": int64 [b, t], "labels": int64 [b], ...}"""
        texts, labels = zip(*samples)
        tokens = self.tokenizer(list(texts), **PADDING, return_tensors="pt")
        numbers = [self.spec["classes"].index(label) for label in labels]
        return {**tokens, "labels": torch.tensor(numbers)}

    def model(self, cfg):
        transformers = import_transformers()
        config = transformers.AutoConfig.for_model(**self.spec["config"])
        kind = transformers.AutoModelForSequenceClassification
        if not self.pretrained:
            return kind.from_config(config)
        options = {"config": config, "ignore_mismatched_sizes": True}  # with a new head
        return kind.from_pretrained(self.pretrained, **options).float()

    def loss(self, model, batch):
        output = model(**batch)
        return output.loss, {"correct": (output.logits.argmax(-1) == batch["labels"]).sum()}


if __name__ == "__main__":
    main(TextClassifier())
