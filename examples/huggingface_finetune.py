"""Hugging Face's Trainer on several ranks: it finds the process group that the torch plugin made.

    python examples/huggingface_finetune.py --nodes 2

The model is a small BERT with random weights, and the task a made-up one (does the number 7 occur?), so that nothing is
fetched. For a real model, name it in `from_pretrained` and give the plugin your token.
"""

from __future__ import annotations

import argparse

import skyproxy as sky


@sky.compute
@sky.stdout(only="head")
def finetune(epochs: int) -> dict[str, float]:
    """Runs on every rank."""
    import tempfile

    import torch
    from datasets import Dataset
    from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

    torch.manual_seed(0)
    numbers = torch.randint(0, 30, (512, 12), generator=torch.Generator().manual_seed(0))
    data = Dataset.from_dict({"input_ids": numbers.tolist(), "labels": (numbers == 7).any(1).long().tolist()})
    config = BertConfig(
        vocab_size=32, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, num_labels=2
    )
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            num_train_epochs=epochs,
            per_device_train_batch_size=16,
            learning_rate=2e-3,
            logging_strategy="epoch",
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=not torch.cuda.is_available(),
        )
        trainer = Trainer(BertForSequenceClassification(config), arguments, train_dataset=data)
        loss = trainer.train().training_loss
        return {"rank": arguments.process_index, "world_size": arguments.world_size, "loss": loss}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=8)
    arguments = parser.parse_args()

    plugins = [sky.plugins.torch(), sky.plugins.huggingface()]
    with sky.Compute(provider=sky.Local(), nodes=arguments.nodes, plugins=plugins) as pool:
        for result in finetune(arguments.epochs) @ pool:
            print(f"rank {result['rank']} of {result['world_size']}: loss {result['loss']:.3f}")


if __name__ == "__main__":
    main()
