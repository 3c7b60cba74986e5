"""Train a model of timm on the images in DIR/CLASS/, which timm's loader reads.

A stop loses the steps since the last epoch. The same command resumes.
"""

import argparse
import os
from pathlib import Path

import torch
from timm import create_model
from timm.data import create_dataset, create_loader, resolve_data_config
from timm.loss import LabelSmoothingCrossEntropy
from timm.optim import create_optimizer_v2
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--data-dir", required=True)
    parser.add_argument("--output-dir", type=Path, default="runs/timm")
    parser.add_argument("--model", default="resnet18")
    parser.add_argument("--image-size", type=int, default=224)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=90)
    args = parser.parse_args()
    dist.init_process_group()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    data = create_dataset("", args.data_dir, is_training=True)
    torch.manual_seed(0)
    classes = len(set(data.reader.class_to_idx.values()))
    model = create_model(args.model, num_classes=classes).to(device)
    size = resolve_data_config({"img_size": args.image_size}, model=model)
    options = {"is_training": True, "distributed": True, "device": device}
    loader = create_loader(
        data, size["input_size"], args.batch_size, use_prefetcher=False, **options
    )
    loss_of = LabelSmoothingCrossEntropy()
    optimizer = create_optimizer_v2(model, opt="adamw", lr=1e-3, weight_decay=0.05)
    checkpoint = args.output_dir / "last.pt"
    first_epoch = 0
    if checkpoint.exists():
        state = torch.load(checkpoint, map_location="cpu", weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first_epoch = state["epoch"] + 1
    if dist.get_rank() == 0:
        print(f"from epoch {first_epoch}", flush=True)
    ddp = DistributedDataParallel(model)
    for epoch in range(first_epoch, args.epochs):
        loader.sampler.set_epoch(epoch)
        for images, labels in loader:
            optimizer.zero_grad()
            loss = loss_of(ddp(images.to(device)), labels.to(device))
            loss.backward()
            optimizer.step()
        if dist.get_rank() == 0:
            args.output_dir.mkdir(parents=True, exist_ok=True)
            state = {"epoch": epoch, "model": model.state_dict()}
            torch.save(state | {"optimizer": optimizer.state_dict()}, f"{checkpoint}.tmp")
            os.replace(f"{checkpoint}.tmp", checkpoint)
            print(f"epoch {epoch}: loss {loss.item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
