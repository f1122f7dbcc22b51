#!/bin/bash
# Fine-tune on conversations with adapters, and generate a reply.
#
#   CHATS=chats.jsonl MODEL=Qwen/Qwen3-0.6B recipes/chat_lora.sh
#
# CHATS: JSON Lines with `messages`. MODEL: a name of the Hub, or a folder with a model, its
# tokenizer and its chat template. Conversations of several turns may need a training template, which
# the rejects name: OPTIONS="--chat-template qwen3_training.jinja".
set -euo pipefail
CHATS=${CHATS:-chats.jsonl}
MODEL=${MODEL:-Qwen/Qwen3-0.6B}
TRAIN=${TRAIN:-}                      # further options of train

pretokenize "$CHATS" chat/ --task chat --tokenizer "$MODEL" ${OPTIONS:-}
shards cat chat/ --targets assistant --rows 1        # [[ ]] marks what the loss counts
train --shards chat/ --model "hf:$MODEL" --lora 16 --run-dir runs/chat --export models/chat $TRAIN
python - <<'END'
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("models/chat")
model = AutoModelForCausalLM.from_pretrained("models/chat")
messages = [{"role": "user", "content": "Hello"}]
inputs = tokenizer.apply_chat_template(
    messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
)
ids = model.generate(**inputs, max_new_tokens=40)[0, inputs["input_ids"].shape[1] :]
print("reply:", tokenizer.decode(ids, skip_special_tokens=True))
END
