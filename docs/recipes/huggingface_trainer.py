"""Train a small BERT on random tokens with the Trainer of Hugging Face.

At a stop, all ranks save after the same step. The same command resumes.
"""

import signal
from pathlib import Path

import torch
from torch import distributed as dist
from torch.utils.data import StackDataset
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    HfArgumentParser,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from transformers.trainer_utils import get_last_checkpoint


class StopTogether(TrainerCallback):
    """After a stop signal to any rank, all ranks save after the same step, and stop."""

    def __init__(self):
        self.received = False
        signal.signal(signal.SIGTERM, self.receive)

    def receive(self, *_):
        self.received = True

    def on_train_begin(self, args, state, control, **_):
        if state.is_world_process_zero:
            print(f"from step {state.global_step}", flush=True)

    def on_train_end(self, args, state, control, **_):
        if state.is_world_process_zero:
            print(f"at step {state.global_step}", flush=True)

    def on_step_end(self, args, state, control, **_):
        if state.global_step % 5 == 0:  # fewer exchanges
            stop = torch.tensor(float(self.received), device=args.device)
            if dist.is_initialized():
                dist.all_reduce(stop)
            if stop:
                control.should_save = True
                control.should_training_stop = True


def main():
    (args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
    torch.manual_seed(args.seed)
    tokens = torch.randint(4, 100, (4000, 16))  # instead of these two lines, load your data
    labels = (tokens[:, 0] > 50).long()
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2}
    config = BertConfig(vocab_size=100, num_hidden_layers=2, num_labels=2, **sizes)
    data = StackDataset(input_ids=tokens, labels=labels)
    model = BertForSequenceClassification(config)
    trainer = Trainer(model, args, train_dataset=data, callbacks=[StopTogether()])
    Path(args.output_dir).mkdir(parents=True, exist_ok=True)
    trainer.train(resume_from_checkpoint=get_last_checkpoint(args.output_dir))


if __name__ == "__main__":
    main()
