"""The figures and rates of FedDRO: Khanduri et al."""

from rookery.experiments.feddro import adult, fig1, fig3, rates, thm41

EXPERIMENTS = (thm41.thm41, rates.rates, fig1.fig1, fig3.fig3, fig1.k32, adult.fig2, adult.fig4)
