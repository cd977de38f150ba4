"""Studies: the arms that a YAML file names, trained with several seeds, and what they came to."""

from mmpreproj.studies.launch import run_study
from mmpreproj.studies.study import Study
from mmpreproj.studies.summary import markdown, summarise

__all__ = ["Study", "markdown", "run_study", "summarise"]
