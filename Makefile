# Every command a person needs. `make help` lists them; each sets up what it needs first.
PYTHON3 ?= python3
VENV ?= .venv
PYTHON := $(VENV)/bin/python
STAMP := $(VENV)/.stamp

# For the reproduce targets and sweep-gamma:
BUDGET ?= paper
SEEDS ?=
DEVICE ?= auto
JOBS ?= 1
HOURS ?= 1
LAUNCHER ?=
ARGS ?=
# A smoke run measures nothing, so it stays out of the evidence.
OUT ?= $(if $(filter smoke,$(BUDGET)),outputs,results)
RUN = budget=$(BUDGET) out_dir=$(OUT) device=$(DEVICE) $(if $(SEEDS),seed=$(SEEDS)) \
	$(if $(LAUNCHER),hydra/launcher=$(LAUNCHER),$(if $(filter-out 1,$(JOBS)),hydra/launcher=joblib hydra.launcher.n_jobs=$(JOBS))) $(ARGS)
TABLE5 = mnist_lr mnist_decay mnist_hidden ptb ptb_lstm ptb_batch text8 text8_lstm reader reader_lstm
key = $(if $(findstring -,$*),$(subst -,/,$*),cooijmans2016/$*)

# A smoke run of an analysis looks at one batch of two short lengths.
BRIEF = $(if $(filter smoke,$(BUDGET)),--lengths 100 200 --num-batches 1)

.PHONY: help setup quickstart test lint types check tables data bench campaign status sweep-gamma reproduce-fig1 reproduce-fig2 \
	reproduce-fig3 reproduce-fig4 reproduce-fig5 reproduce-attention reproduce-fig6 reproduce-table5 reproduce-laurent2015-fig1 reproduce-laurent2015-fig2 reproduce-zhang2017-fig2 reproduce-zhang2017-fig3 \
	plan-fig1 plan-fig2 plan-fig3 plan-fig4 plan-fig5 plan-attention plan-fig6 plan-table5 plan-laurent2015-fig1 plan-laurent2015-fig2 plan-zhang2017-fig2 plan-zhang2017-fig3
.DEFAULT_GOAL := help

help:  ## this list
	@awk -F ':.*## ' '/^[a-z%0-9_-]+:.*## / {printf "  make %-18s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo "  Options of reproduce-... and sweep-...: BUDGET=paper|cpu|smoke SEEDS=0,1,2 DEVICE=auto|cpu|cuda JOBS=2"
	@echo "  LAUNCHER=slurm OUT=results ARGS='any hydra override'. BNRNN_DATA: the folder of the data sets."

setup: $(STAMP)  ## install everything into .venv (the other targets do this by themselves)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON3) -m venv $(VENV)
	$(PYTHON) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,sweep]'
	@touch $@

quickstart: setup  ## LSTM and BN-LSTM side by side on real digits, in minutes on a CPU, no download
	$(PYTHON) -m bnrnn.train experiment=quickstart budget=$(BUDGET) device=cpu $(ARGS)
	@$(PYTHON) scripts/make_tables.py --show quickstart --results outputs
	@echo "Next: $(VENV)/bin/wandb leet outputs/quickstart/$(BUDGET)/wandb     every curve, in the terminal"
	@echo "      make data                                       MNIST, Penn Treebank, text8"
	@echo "      make reproduce-table1 BUDGET=smoke SEEDS=0      does the paper's table run here? (minutes)"
	@echo "      make reproduce-table1 BUDGET=cpu SEEDS=0 JOBS=2 its first 2,500 updates (hours on two cores)"
	@echo "      make help                                       everything else"

test: setup  ## the whole test suite, without GPU or network
	$(PYTHON) -m pytest -n 2 -q

lint: setup  ## style of the code
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

types: setup  ## types of the code
	$(VENV)/bin/pyright

check: setup  ## rendered tables are what the results say
	$(PYTHON) scripts/make_tables.py --check

tables: setup  ## render tables and figures from results/
	$(PYTHON) scripts/make_tables.py

data: setup  ## download MNIST, Penn Treebank and text8 (to BNRNN_DATA, or data/), checksums verified
	$(PYTHON) scripts/prepare_data.py

bench: setup  ## time a step of a layer against nn.LSTM and a naive loop (QUICK=1: two minutes; DEVICE=cuda)
	$(PYTHON) scripts/bench.py --device $(DEVICE) $(if $(QUICK),--quick) $(ARGS)

campaign: setup  ## spend HOURS=3 on the runs that are worth most (conf/campaign.yaml), with JOBS=2 side by side
	$(PYTHON) -m bnrnn.campaign hours=$(HOURS) jobs=$(JOBS) out_dir=$(OUT) $(ARGS)

status: setup  ## what of the campaign is finished, running and left, and how long the rest takes
	@$(PYTHON) -m bnrnn.campaign status out_dir=$(OUT) $(ARGS)

plan-%: setup  ## what a reproduce target would run and how long it takes here: plan-table2, plan-laurent2015-table2
	$(PYTHON) -m bnrnn.plan experiment=$(key) $(RUN)

reproduce-%: setup  ## train all runs of a table and render it: reproduce-table1, reproduce-laurent2015-table2, ...
	$(PYTHON) -m bnrnn.train experiment=$(key) $(RUN)
	$(if $(filter results,$(OUT)),$(PYTHON) scripts/make_tables.py)
	@$(PYTHON) scripts/make_tables.py --show $(key) --results $(OUT)

reproduce-fig1: setup  ## gradients through a BN tanh RNN, and tanh' (minutes on a CPU)
	$(PYTHON) experiments/cooijmans2016/fig1a.py --out-dir $(OUT) $(ARGS)
	$(PYTHON) experiments/cooijmans2016/fig1b.py --out-dir $(OUT)

reproduce-fig2: reproduce-table1  ## learning curves of Table 1's runs

reproduce-fig3: reproduce-table2  ## character Penn Treebank: learning curves (3a), test by length of segments (3b)
	$(PYTHON) experiments/cooijmans2016/fig3b.py --out-dir $(OUT) $(BRIEF)
	$(if $(filter results,$(OUT)),$(PYTHON) scripts/make_tables.py)

reproduce-fig5: reproduce-table2  ## population statistics over time, of Table 2's BN-LSTM
	$(PYTHON) experiments/cooijmans2016/fig5.py --out-dir $(OUT)

reproduce-fig6: reproduce-fig6_pmnist reproduce-fig6_ptb  ## the initial gamma, on permuted MNIST and Penn Treebank

reproduce-table5: $(addprefix reproduce-table5_,$(TABLE5))  ## the searched values

reproduce-laurent2015-fig1: reproduce-laurent2015-table1  ## learning curves of Table 1's speech models

reproduce-laurent2015-fig2: reproduce-laurent2015-table2  ## learning curves of Table 2's word models

reproduce-fig4: reproduce-fig4a reproduce-table4  ## questions about CNN passages, shortened (4a) and whole (4b)

reproduce-fig4_small: reproduce-fig4_small_equal reproduce-fig4_small_fair  ## the same on bAbI and IE-ER, three ways

reproduce-zhang2017-fig2: reproduce-zhang2017-table1  ## learning curves of Table 1's runs

reproduce-zhang2017-fig3: reproduce-zhang2017-flickr8k  ## images with the captions of the three models
	$(PYTHON) experiments/zhang2017/fig3.py --out-dir $(OUT)

reproduce-attention: reproduce-fig4_small_fair  ## where the readers of bAbI look
	$(PYTHON) experiments/cooijmans2016/attention.py --out-dir $(OUT)

plan-fig2: plan-table1
plan-fig4: plan-fig4a plan-table4
plan-attention: plan-fig4_small_fair
plan-fig4_small: plan-fig4_small_equal plan-fig4_small_fair
plan-fig3 plan-fig5: plan-table2
plan-fig6: plan-fig6_pmnist plan-fig6_ptb
plan-table5: $(addprefix plan-table5_,$(TABLE5))
plan-laurent2015-fig1: plan-laurent2015-table1
plan-laurent2015-fig2: plan-laurent2015-table2
plan-zhang2017-fig3: plan-zhang2017-flickr8k
plan-zhang2017-fig2: plan-zhang2017-table1
plan-fig1:
	@echo "Fig. 1 trains nothing: make reproduce-fig1 takes minutes on a CPU"

sweep-gamma: reproduce-fig6_pmnist  ## the initial gamma on permuted MNIST (Fig. 6), one run a gamma
