"""The five papers: how each is cited, and its entry on the pages."""

from typing import NamedTuple

FEDNEST_PAPER = (
    "Tarzanagh, Li, Thrampoulidis and Oymak, *FedNest: Federated Bilevel, Minimax, and Compositional Optimization*"
)
FEDBIO_PAPER = (
    "Li, Huang and Huang, Communication-Efficient Federated Bilevel Optimization with Global and Local Lower Level "
    "Problems"
)
ASFBO_PAPER = (
    "Communication-Efficient Adaptive Federated Bi-level Optimization with Data and System Heterogeneity (ASFBO)"
)
FEDDRO_PAPER = (
    "Khanduri et al., On Federated Compositional Optimization: Algorithms, Analysis, and Guarantees (under review)"
)
WEIGHTED_PAPER = "Federated Learning on Adaptively Weighted Nodes by Bilevel Optimization (anonymous, under review)"


class Paper(NamedTuple):
    """A paper on the pages: its short name, and what to know before reading its table."""

    name: str
    about: str


PAPERS = {
    "fednest": Paper("FedNest", "Tarzanagh, Li, Thrampoulidis and Oymak, ICML 2022."),
    "fedbio": Paper(
        "FedBiO",
        "Li, Huang and Huang, NeurIPS 2023. Its text at hand has no experiments: the applications it names are set up "
        "by us, and their claims are our own.",
    ),
    "asfbo": Paper("ASFBO", "Adaptive federated bilevel optimization with data and system heterogeneity."),
    "feddro": Paper("FedDRO", "Federated compositional optimization, for robust and fair training."),
    "weighted": Paper("Weighted nodes", "Federated learning on adaptively weighted nodes, anonymous, under review."),
    "privacy": Paper(
        "Privacy", "What privacy for each client costs nested methods: our own experiments, with claims of our own."
    ),
}
