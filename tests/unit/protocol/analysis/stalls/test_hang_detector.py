"""When the finding of a stall is renewed."""

from ftmon.protocol.analysis.stalls.evidence import Evidence, Frame
from ftmon.protocol.analysis.stalls.hang_detector import HangDetector
from ftmon.protocol.analysis.stalls.judge import Verdict

HUNG = Verdict(kind="missing", waiting=(0,), hung=(1,), sure=True, age=8.0)


def test_a_finding_is_renewed_once_the_stacks_of_its_rank_are_known_and_not_again_for_each_inspection() -> None:
    detector = HangDetector()
    silent = Evidence(1.0)
    located = Evidence(2.0, by="signal", frames=(Frame("train.py", 7, "main"),))
    given = [{}, {}, {0: located}, {0: located, 1: silent}, {0: located, 1: located}, {0: located, 1: located}]
    states = [[one.state for one in detector.tick(float(at), HUNG, found=found)] for at, found in enumerate(given)]
    assert states == [[], ["raised"], ["updated"], [], ["updated"], []]
