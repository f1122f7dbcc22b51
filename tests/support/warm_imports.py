"""What the warm process imports before it forks, as `import support.warm_imports`."""

import contextlib
import gc
import importlib

gc.disable()  # collections would take a sixth of the time of these imports
for name in (
    *("torch", "torch._dynamo", "torch.distributed.checkpoint", "torch.distributed.fsdp"),
    *("torch.distributed.tensor.experimental", "tokenfeed.trainer.distributed.parallel"),
    *("jinja2", "numpy.ma"),
    *("numpy", "pyarrow.ipc", "msgspec", "safetensors.torch", "tokenizers", "yaml"),
    *("transformers.trainer", "transformers.models.llama.modeling_llama"),
    *("awkward", "gigatoken", "rich.console", "rich.progress", "rich.table"),
    *("pandas", "datasets", "peft", "lightning.pytorch", "accelerate"),
    *("tokenfeed.tools.pretokenizing.make", "tokenfeed.tools.pretokenizing.options"),
    "tokenfeed.tools.data_sets.select",
    *("tokenfeed.tools.report", "tokenfeed.tools.train", "tokenfeed.trainer.loop.run"),
    "support.warm",
):
    with contextlib.suppress(ImportError):  # some are optional
        importlib.import_module(name)
gc.freeze()  # else collections of the forks would look at, and copy, all of it
gc.enable()
