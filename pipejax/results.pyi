"""Records that functions return, by room."""

from pipejax.analysis.comparison import Comparison as Comparison
from pipejax.analysis.formula.family import Family as Family
from pipejax.analysis.formula.form import Formula as Formula
from pipejax.analysis.formula.versus import Region as Region, Versus as Versus
from pipejax.analysis.paths.head_of_line_blocking import TransferWaits as TransferWaits
from pipejax.analysis.paths.longest_paths import LongPath as LongPath
from pipejax.analysis.runs.evaluate import (
    ActivationMemory as ActivationMemory,
    GatheredWeights as GatheredWeights,
)
from pipejax.analysis.runs.staleness import Staleness as Staleness
from pipejax.analysis.runs.timeline import Bar as Bar, LaneTimes as LaneTimes
from pipejax.analysis.step.faults import Fault as Fault
from pipejax.analysis.step.step_report import Part as Part, StepReport as StepReport
from pipejax.analysis.step.validation import (
    PredictionErrors as PredictionErrors,
    Validation as Validation,
)
from pipejax.analysis.uncertainty.corners import Corners as Corners
from pipejax.analysis.uncertainty.jitter import Jittered as Jittered, Robustness as Robustness
from pipejax.analysis.uncertainty.sensitivity import Sensitivity as Sensitivity
from pipejax.checker.verify import Verdict as Verdict
from pipejax.costs.model.launchers import Launch as Launch
from pipejax.search.calibration.calibrate import Calibration as Calibration
from pipejax.search.calibration.calibrate_links import LinkCalibration as LinkCalibration
from pipejax.search.found import Found as Found
from pipejax.search.orders.deal import Deal as Deal
from pipejax.search.orders.permutations import MicrobatchOrder as MicrobatchOrder
from pipejax.search.orders.places import WorkerPlaces as WorkerPlaces
from pipejax.search.orders.transfers import TransferOrder as TransferOrder
from pipejax.search.partition.partition import Partition as Partition
from pipejax.search.remedies.explain import Explanation as Explanation, Remedy as Remedy
from pipejax.search.schedule.plan import Optimum as Optimum
from pipejax.search.tuning.chunks import PromptChunks as PromptChunks
from pipejax.search.tuning.lookahead import Gathering as Gathering
from pipejax.search.tuning.tune import TunedSetting as TunedSetting
from pipejax.sweep.declaration import Sweep as Sweep
from pipejax.sweep.plan.result import PlanResult as PlanResult
from pipejax.sweep.store import STATUS as STATUS
from pipejax.traces.findings.analysis import (
    Analysis as Analysis,
    Forecast as Forecast,
    NewDeal as NewDeal,
    Stall as Stall,
)
from pipejax.traces.findings.attribution import Attribution as Attribution, Share as Share
from pipejax.traces.findings.op_times import OpTimes as OpTimes
from pipejax.traces.findings.suspects import Suspect as Suspect
from pipejax.traces.record import LeftOut as LeftOut, StepBudget as StepBudget
from pipejax.traces.replaying.pipelines import Pipeline as Pipeline, Pipelines as Pipelines
from pipejax.traces.replaying.replay import Replay as Replay
