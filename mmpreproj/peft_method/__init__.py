"""The method as one of Hugging Face PEFT's, beside LoRA.

    import peft
    from mmpreproj import PreProjPeftConfig  # importing it is what tells PEFT of the method

    model = peft.get_peft_model(base, PreProjPeftConfig(expansion=1.25))
    model.save_pretrained("adapter")
    model = peft.PeftModel.from_pretrained(another_base, "adapter")

The parameters go where `mmpreproj.attach` puts them, by the same means: the attention's class is
swapped and nothing is wrapped, so that no key of the base changes but for PEFT's own prefix. Where
`attach` has one `PreProj`, a `PreProjLayer` holds one for each adapter and runs the active one. It
is nonlinear: merging is refused.

Beside LoRA: one model can carry adapters of both, under different names and in either order:

    lora = peft.get_peft_model(base, LoraConfig(...))
    both = peft.get_peft_model(lora, PreProjPeftConfig(), adapter_name="second")

`both` switches and unloads its own adapters alone, but like every PEFT method its disable_adapter()
turns off all there are, and save_pretrained writes all there are.
"""

try:
    import peft
except ImportError as error:
    raise ImportError("PreProjPeftConfig needs Hugging Face PEFT: pip install peft") from error

from peft.mapping import (
    PEFT_TYPE_TO_CONFIG_MAPPING,
    PEFT_TYPE_TO_PREFIX_MAPPING,
    PEFT_TYPE_TO_TUNER_MAPPING,
)
from peft.tuners.tuners_utils import BaseTuner

if not hasattr(BaseTuner, "_get_adapter_state_dict"):  # adapters would be saved under wrong names
    raise ImportError(f"PreProjPeftConfig needs peft 0.21 or newer, found {peft.__version__}")

from mmpreproj.peft_method.config import PreProjPeftConfig, PreProjPeftType
from mmpreproj.peft_method.layer import PreProjLayer
from mmpreproj.peft_method.tuner import PreProjModel

# peft.utils.register_peft_method, but for its list of names, which is closed
PEFT_TYPE_TO_CONFIG_MAPPING[PreProjPeftType.PREPROJ] = PreProjPeftConfig
PEFT_TYPE_TO_TUNER_MAPPING[PreProjPeftType.PREPROJ] = PreProjModel
PEFT_TYPE_TO_PREFIX_MAPPING[PreProjPeftType.PREPROJ] = PreProjModel.prefix

__all__ = ["PreProjLayer", "PreProjModel", "PreProjPeftConfig"]
