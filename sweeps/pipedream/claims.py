"""The claims of the PipeDream theory (arXiv 2606.03498), one verdict each, read off datasets.

All verdicts are of the settings that were run, at the step sizes that end lowest; only experiment 1
is read at the published ones. Of the seeds the median counts. One scheme is below
another if it is so with every seed: where seeds do not agree, the claim is open. What the paper's
delay is exactly is a finding (`sweeps.findings.delays`).
"""

from pipejax.training import RULES
from sweeps.kit.claims import BY_CONSTRUCTION, FITTED, OURS, SHOWN, Claim, command
from sweeps.pipedream.checks import (
    CLOSE,
    END,
    FALL,
    FLAT,
    LOCAL,
    POWER,
    ROUNDING,
    admission,
    bound_holds,
    bound_law,
    caption_scaling,
    captioned,
    compared,
    delay_law,
    delay_term_needed,
    machines,
    matching,
    nesterov_ends,
    order_only,
    published_end,
    rules_agree,
    scaling_flat,
    scaling_local,
    scaling_winner,
)

STORES = (
    "staleness",
    "convergence_bound",
    "pipedream_schedules",
    "pipedream_quadratic",
    "pipedream_match",
    "pipedream_nesterov",
    "pipedream_logistic",
    "pipedream_language",
    "pipedream_scaling",
    "pipedream_machines",
)
PUBLISHED_1 = {
    "pipedream": (3e-7, "1/16"),
    "rpd delta=8": (1e-11, "1/8"),
    "rpd delta=30": (3e-11, "1/8"),
    "rpd delta=60": (2e-6, "1/16"),
    "rpd delta=180": (3e-3, "1/16"),
    "rpd delta=420": (0.4, "1/32"),
}
FOUND = (
    "no log gives the setting of experiment 3: dimension, gradient noise and the fixed order of "
    "batches were searched until this order came out"
)
ALGEBRA = "algebra: S^2 - S/2 in the delay term of the bound, at the step size 1/sqrt(K)"
LANGUAGE = ("pipedream", *(f"local-sgd H={h}" for h in (8, 4, 1)))
CLAIMS: tuple[Claim, ...] = (
    Claim(
        "T1",
        "the largest delay of PipeDream is S^2 - S/2 + O(1)",
        "S^2 - S/2 + O(1)",
        "staleness.pdf",
        delay_law,
    ),
    Claim(
        "T3",
        "the bound of RPD holds",
        "theorem",
        "convergence_bound.pdf",
        bound_holds,
        kind=BY_CONSTRUCTION,
        why="a theorem: a run above its bound would be an error of ours",
    ),
    Claim(
        "T3, term",
        "its delay term is needed: some run is above what is left of the bound without it",
        "",
        "convergence_bound.pdf",
        delay_term_needed,
        kind=OURS,
    ),
    Claim(
        "T4",
        "with PipeDream's delay and gamma ~ 1/sqrt(K) its delay term is Theta(S^4/K)",
        "Theta(S^4/K)",
        "convergence_bound.pdf",
        bound_law,
        kind=BY_CONSTRUCTION,
        why=ALGEBRA,
        thresholds=(POWER, ROUNDING),
    ),
    Claim(
        "T5",
        "limited at its first stage only, as in the authors' timelines, PipeDream holds 4, 4, 3, 1 "
        "microbatches at S = 4 instead of S - s; end and delays are the same",
        "",
        "pipedream_schedules.pdf",
        admission,
        kind=OURS,
    ),
    *(
        Claim(
            f"1, {scheme.removeprefix('rpd ')}",
            f"{scheme} on the random quadratic ends at",
            f"about {gap:g} ({step_size})",
            "pipedream_quadratic.pdf",
            published_end(scheme, gap),
            thresholds=(END,),
        )
        for scheme, (gap, step_size) in PUBLISHED_1.items()
    ),
    Claim(
        "1, order",
        "the more delay, the higher RPD ends",
        "8 < 30 < 60 < 180 < 420",
        "pipedream_quadratic.pdf",
        compared("pipedream_quadratic", *list(PUBLISHED_1)[1:], x="updates"),
    ),
    Claim(
        "1, match",
        "RPD with delta = S^2 - S/2 is close to PipeDream all along",
        "close (S = 8)",
        "pipedream_match.pdf",
        matching,
        thresholds=(CLOSE,),
    ),
    Claim(
        "1, caption",
        "the same in the setting of its caption, 60 batches of 10",
        "",
        "",
        captioned,
        kind=SHOWN,
        why="no curves of this setting are published",
    ),
    Claim(
        "2, ends",
        "PipeDream and LocalSGD H=2, 5, 30 on Nesterov's quadratic end at",
        "2.73, 20, 23, 270",
        "pipedream_nesterov.pdf",
        nesterov_ends,
        thresholds=(END,),
    ),
    Claim(
        "2, winner",
        "PipeDream ends below LocalSGD H=2 there, the best of them",
        "2.73 against 20",
        "pipedream_nesterov.pdf",
        compared("pipedream_nesterov", "pipedream", "local-sgd H=2"),
    ),
    Claim(
        "2, order",
        "the fewer local steps, the better",
        "H=2 < H=5 < H=30",
        "pipedream_nesterov.pdf",
        compared("pipedream_nesterov", *LOCAL),
    ),
    Claim(
        "3, winner",
        "LocalSGD H=5 ends below PipeDream on logistic regression",
        "0.0082 against 0.0376",
        "pipedream_logistic.pdf",
        compared("pipedream_logistic", "local-sgd H=5", "pipedream"),
        kind=FITTED,
        why=FOUND,
    ),
    Claim(
        "3, order",
        "H=5 is best, then H=2, then PipeDream, then H=30",
        "0.0082 < 0.0231 < 0.0376 < 0.178",
        "pipedream_logistic.pdf",
        compared(
            "pipedream_logistic", "local-sgd H=5", "local-sgd H=2", "pipedream", "local-sgd H=30"
        ),
        kind=FITTED,
        why=FOUND,
    ),
    Claim(
        "4, winner",
        "PipeDream ends below LocalSGD H=8 on the language model, the best of them",
        "2.5 against 2.65",
        "pipedream_language.pdf",
        order_only(
            compared("pipedream_language", *LANGUAGE[:2]),
            "pipedream_language",
            first=LANGUAGE[0],
            second=LANGUAGE[1],
            published="2.5 and 2.65",
        ),
    ),
    Claim(
        "4, order",
        "the more local steps, the better",
        "H=8 < H=4 < H=1",
        "pipedream_language.pdf",
        compared("pipedream_language", *LANGUAGE[1:]),
    ),
    Claim(
        "5, PipeDream",
        "PipeDream and RPD stay near 1e-2 for all S",
        "0.76e-2 to 1.6e-2",
        "pipedream_scaling.pdf",
        scaling_flat,
        thresholds=(FLAT,),
    ),
    Claim(
        "5, LocalSGD",
        "LocalSGD falls with S up to 64, and ends at 1.3e-3 .. 1.55e-3 from S = 32 on",
        "1.3e-2 at 2, 1.3e-3 at 64",
        "pipedream_scaling.pdf",
        scaling_local,
        thresholds=(FALL,),
    ),
    Claim(
        "5, winner",
        "LocalSGD wins from S = 4 on",
        "S >= 4 (0.0072 against 0.0096 there)",
        "pipedream_scaling.pdf",
        scaling_winner,
    ),
    Claim(
        "5, caption",
        "the same in the setting of its caption, 60 batches of 10, 660 slots",
        "",
        "",
        caption_scaling,
        kind=SHOWN,
        why="no curves of this setting are published; its gradients have no noise",
    ),
    Claim(
        "6",
        f"the rule of the step size does not change who wins ({', '.join(RULES)})",
        "",
        "pipedream_nesterov.pdf",
        rules_agree,
        kind=OURS,
    ),
    *(
        Claim(
            f"7, {name}",
            f"who wins at equal seconds on nine machines, {objective}",
            "",
            f"pipedream_machines_{name}.pdf",
            machines(objective),
            kind=SHOWN,
            why="nothing is published about machines",
        )
        for name, objective in (
            ("nesterov", "tridiagonal quadratic"),
            ("logistic", "logistic regression"),
        )
    ),
)


def main() -> None:
    """Print the table of claims and keep it beside the datasets."""
    stores = {name: f"{name}.zarr" for name in STORES}
    command(__doc__ or "", CLAIMS, stores, "pipedream_claims.json")


if __name__ == "__main__":
    main()
