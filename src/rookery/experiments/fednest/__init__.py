"""The figures of FedNest: Tarzanagh, Li, Thrampoulidis and Oymak, ICML 2022."""

from rookery.experiments.fednest import collapse, fig2, fig3, fig4, fig5, fig6, rates

FIGURES = (fig4.fig4, fig2.fig2a, fig2.fig2b, fig2.fig2c, fig5.fig5, fig6.fig6, fig3.fig3a, fig3.fig3b)
EXPERIMENTS = (*FIGURES, collapse.collapse, rates.rates)
