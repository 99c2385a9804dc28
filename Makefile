# All commands. `make help` lists them. Each command first installs what it needs.
PYTHON3 ?= python3
VENV ?= .venv
PYTHON := $(VENV)/bin/python
STAMP := $(VENV)/.stamp

# Options of the reproduce targets and of sweep-gamma:
BUDGET ?= paper
SEEDS ?=
DEVICE ?= auto
JOBS ?= 1
HOURS ?= 1
LAUNCHER ?=
WORKERS ?= 4
WAIT ?= 1
ARGS ?=
# The results of a smoke run mean nothing, so they are not written to results/.
OUT ?= $(if $(filter smoke,$(BUDGET)),outputs,results)
# The shell takes a quoted value as one word, whatever it contains; ARGS is a list of words. Hydra has quotes of its own.
quoted = '$(subst ','\'',$(1))'
each = $(foreach word,$(1),$(call quoted,$(word)))
FOLDER = $(call quoted,$(OUT))
RUN = $(call quoted,budget=$(BUDGET)) $(call quoted,out_dir="$(subst ",\",$(OUT))") $(call quoted,device=$(DEVICE)) \
	$(if $(SEEDS),$(call quoted,seed=$(SEEDS))) \
	$(if $(SLURM),$(call quoted,hydra.launcher.workers=$(WORKERS)) $(call quoted,hydra.launcher.jobs=$(JOBS)),\
	$(if $(LAUNCHER),$(call quoted,hydra/launcher=$(LAUNCHER)))) $(call each,$(ARGS))
SLURM = $(filter slurm,$(LAUNCHER))
TRAIN = $(PYTHON) -m $(if $(LAUNCHER)$(filter 1,$(JOBS)),bnrnn.train,bnrnn.commands.sweep $(call quoted,jobs=$(JOBS)))
key = $(call quoted,$(if $(findstring -,$*),$(subst -,/,$*),cooijmans2016/$*))

# experiments/<paper>/claims.yaml lists the recipes and analyses of a table or figure.
RECIPES = recipes=$$($(PYTHON) scripts/needs.py recipes $(key))
ANALYSES = analyses=$$($(PYTHON) scripts/needs.py analyses $(key))

RENDER = $(ANALYSES); for analysis in $$analyses; do $(PYTHON) $$analysis --out-dir $(FOLDER) $(if $(filter smoke,$(BUDGET)),--smoke); done; \
	if [ $(FOLDER) -ef results ]; then $(PYTHON) scripts/make_tables.py; fi; \
	$(RECIPES); for recipe in $$recipes; do $(PYTHON) scripts/make_tables.py --show $$recipe --results $(FOLDER); done

.PHONY: help setup quickstart test test-slow test-slurm sanitize lint types check seal tables verify compare site site-test data doctor bench running notebook
.PHONY: kernels emulate versions stress gpu-evidence wheels campaign status sweep-gamma
.DEFAULT_GOAL := help

# The list has a heading for each line that begins with ##, and a line for each target that ends with ## and a text.
help:  ## print this list
	@awk -F ':.*## ' '/^## / {printf "\n%s\n", substr($$0, 4)} \
		/^[a-z%0-9_-]+:.*## / {sub(/%/, "NAME", $$1); printf "  make %-16s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))
	@printf '\nTables and figures, in the place of NAME:\n'
	@for claims in experiments/*/claims.yaml; do paper=$$(basename $$(dirname $$claims)); \
		names=$$(sed -n -e '/^needs:/,/^$$/s/^  \([a-z0-9_]*\):.*/\1/p' -e '/^\(paper\|needs\|claims\):/d' \
			-e 's/^\([a-z0-9_]*\):.*/\1/p' $$claims | sort -u | sed "s/^/$$paper-/; s/^cooijmans2016-//"); \
		echo $$names | fold -s -w 110 | sed 's/^/  /'; done
	@printf '\nOptions of reproduce-NAME, plan-NAME, status-NAME and sweep-gamma:\n'
	@echo "  BUDGET=paper|cpu|smoke SEEDS=0,1,2 DEVICE=auto|cpu|cuda JOBS=2 OUT=results ARGS='any hydra override'"
	@echo "  LAUNCHER=slurm (WORKERS=4 JOBS=1 WAIT=0)"
	@echo "  BNRNN_DATA: the folder of the datasets."

## Begin here
setup: $(STAMP)  ## install everything into .venv; the other targets do this when needed

$(STAMP): pyproject.toml constraints.txt
	@echo "Installing torch and what else is needed into $(VENV): up to 2 GB, some minutes."
	$(PYTHON3) -m venv $(VENV)
	$(PYTHON) -m pip install --disable-pip-version-check -c constraints.txt -e '.[dev,sweep]'
	@touch $@

quickstart: setup  ## train LSTM and BN-LSTM on small images of digits: minutes on a CPU, no download
	$(PYTHON) -m bnrnn.train experiment=quickstart $(call quoted,budget=$(BUDGET)) device=cpu $(call each,$(ARGS))
	@$(PYTHON) scripts/make_tables.py --show quickstart --results outputs
	@echo "Next: $(VENV)/bin/wandb leet" $(call quoted,outputs/quickstart/$(BUDGET)/wandb) "    every curve, in the terminal"
	@echo "      make data                                                   MNIST, Penn Treebank, text8"
	@echo "      make reproduce-table1 BUDGET=smoke SEEDS=0                  does the paper's table run here? (minutes)"
	@echo "      make reproduce-table1 BUDGET=cpu SEEDS=0 JOBS=2 OUT=outputs its first 2,500 updates (hours on two cores)"
	@echo "      make help                                                   everything else"
	@echo "Do these runs agree with the stored ones?"
	@$(PYTHON) -m bnrnn.commands.verify $(call quoted,outputs/quickstart/$(BUDGET)) || \
		echo "One of twenty cells differs by chance. docs/reproducing.md says what to look at first."

## Tests of the code
test: setup  ## run the test suite; needs no GPU and no network
	$(PYTHON) -m pytest -n 2 -q -m "not slow and not browser"

test-slow: setup  ## run the tests of five seconds or more: exported programs, compiled kernels, the package, kills
	$(PYTHON) -m pytest -n 2 -q -m slow

versions: setup  ## test under the lowest and the highest versions of all packages that pyproject.toml allows: gigabytes
	$(VENV)/bin/nox

test-slurm: setup  ## test sweeps on a Slurm cluster that it starts on this machine: as root, half an hour
	$(PYTHON) -m pytest -q --durations=0 -m slurm tests/commands/test_slurm.py

# The sanitizer's library must be loaded before python's own. Leaks are not looked for: python has some of its own.
sanitize: setup  ## run the tests of the engines under AddressSanitizer and UndefinedBehaviorSanitizer
	BNRNN_CXXFLAGS="-O1 -g -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=all" \
	LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libstdc++.so.6)" \
	ASAN_OPTIONS=detect_leaks=0 XDG_CACHE_HOME=$(VENV)/sanitized \
	$(PYTHON) -m pytest -q tests/scan/test_lstm.py tests/scan/test_gru.py tests/scan/test_rhn.py tests/scan/test_norm.py tests/scan/test_noise.py \
		tests/scan/test_arguments.py tests/scan/test_products.py tests/scan/test_memory.py tests/test_kernel_cache.py

lint: setup  ## check the style of the code
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

types: setup  ## check the types of the code
	$(VENV)/bin/pyright

## Tables, figures and their site
check: setup  ## fail if a stored result is not as sealed, or a rendered table differs from the results
	$(PYTHON) scripts/make_tables.py --check

seal: setup  ## seal the stored results as they are now, so that `make check` notices any later change
	$(PYTHON) scripts/make_tables.py --seal

tables: setup  ## render tables and figures from results/
	$(PYTHON) scripts/make_tables.py

# Only an OUT that is given counts: the default of the other targets is the folder of the stored results itself.
verify: setup  ## compare finished runs with the stored ones: default OUT=outputs
	$(PYTHON) -m bnrnn.commands.verify $(if $(filter file,$(origin OUT)),outputs,$(FOLDER))

compare: setup  ## plot curves in the terminal: KEY='quickstart cooijmans2016/table1' METRIC=valid/loss OUT=results
	$(PYTHON) scripts/compare.py $(call each,$(or $(KEY),cooijmans2016/table1)) --results $(FOLDER) $(if $(METRIC),--metric $(call quoted,$(METRIC)))

site: setup  ## build a site of documents, claims and results in site/; needs no network to be read
	$(PYTHON) scripts/make_site.py

site-test: site  ## build the site and test it in Chromium, which must be installed (Debian: apt-get install chromium)
	$(PYTHON) -m pytest -q -m browser tests/test_site.py

## Data and speed
data: setup  ## download MNIST, Penn Treebank and text8 to BNRNN_DATA or data/, and verify them
	$(PYTHON) -m bnrnn.commands.prepare

doctor: setup  ## tell in a minute what works here: engines, GPU, data, programs, disk, locks (DEVICE=auto)
	$(PYTHON) -m bnrnn.commands.doctor --device $(call quoted,$(DEVICE)) --out-dir $(FOLDER)

bench: setup  ## time the layers, nn.LSTM and a Python loop, into results/bench/ (QUICK=1: minutes; DEVICE=cuda; PEERS=1: JAX too)
	$(PYTHON) scripts/bench.py --device $(call quoted,$(DEVICE)) $(if $(filter-out 0,$(QUICK)),--quick) $(if $(PEERS),--peers) $(call each,$(ARGS))
	$(PYTHON) scripts/bench.py --device $(call quoted,$(DEVICE)) --padded $(call each,$(ARGS))

kernels: setup  ## compile the Triton kernels for three GPUs, and write what they need into docs/kernels.md; needs none
	$(PYTHON) scripts/kernels.py

emulate: setup  ## run the compiled Triton kernels on a CPU, instruction by instruction: half an hour, needs no GPU
	$(PYTHON) -m scripts.emulate $(ARGS)
	$(PYTHON) scripts/make_tables.py

running: setup  ## compare running with exact population statistics, for docs/layer.md; minutes, needs Penn Treebank
	$(PYTHON) scripts/running.py
	$(PYTHON) scripts/make_tables.py

notebook: setup  ## run examples/gamma.ipynb, and store its figures
	$(PYTHON) scripts/notebook.py examples/gamma.ipynb

stress: setup  ## kill trainings KILLS=1000 times and damage INPUTS=1000 files; ten minutes
	$(PYTHON) -m tests.stress $(call quoted,kills=$(or $(KILLS),1000)) $(call quoted,inputs=$(or $(INPUTS),1000))

## Training
# Without a package index: put the wheels there that `make wheels` has downloaded elsewhere. Torch is the machine's own.
OFFLINE = PYTHONPATH=.offline:.$${PYTHONPATH:+:$$PYTHONPATH} $(PYTHON3)
EVIDENCE = scripts/gpu_evidence.py $(call quoted,hours=$(HOURS)) \
	$(call quoted,device=$(if $(filter auto,$(DEVICE)),cuda,$(DEVICE))) out_dir=evidence $(call each,$(ARGS))

gpu-evidence: $(if $(wildcard wheels),,setup)  ## with a GPU: doctor, benchmarks and the most valuable runs, into evidence/; default HOURS=1
	@if [ -d wheels ]; then \
		$(PYTHON3) -m pip install --quiet --no-index --no-deps --target .offline --upgrade wheels/*.whl && \
		$(OFFLINE) $(EVIDENCE); \
	else $(PYTHON) $(EVIDENCE); fi

# For Linux on x86-64. Only antlr4 has no wheel; it is plain Python, so a wheel that is built here fits everywhere.
wheels: setup  ## download into wheels/ what a machine without a package index needs for gpu-evidence (PYTHON_VERSION=3.12)
	$(PYTHON) -m pip wheel --quiet --no-deps -c constraints.txt --wheel-dir wheels antlr4-python3-runtime
	$(PYTHON) -m pip download --quiet -c constraints.txt --dest wheels --find-links wheels --only-binary=:all: \
		--python-version $(call quoted,$(or $(PYTHON_VERSION),3.12)) --implementation cp \
		$(foreach glibc,_2_28 _2_27 _2_24 _2_17 2014 1,--platform manylinux$(glibc)_x86_64) \
		hydra-core omegaconf wandb jaxtyping plotext rich pooch tqdm pyyaml

campaign: setup  ## train the most valuable missing runs (conf/campaign.yaml); defaults HOURS=1 JOBS=1
	$(PYTHON) -m bnrnn.commands.campaign $(call quoted,hours=$(HOURS)) $(call quoted,jobs=$(JOBS)) \
		$(if $(DEVICE),$(call quoted,device=$(DEVICE))) $(call quoted,out_dir=$(OUT)) $(call each,$(ARGS))

status: setup  ## list the campaign's runs and those of submitted sweeps: finished, running and left, and the time left
	@$(PYTHON) -m bnrnn.commands.campaign status $(call quoted,out_dir=$(OUT)) $(if $(SINCE),$(call quoted,since=$(SINCE))) $(call each,$(ARGS))
	@$(PYTHON) -m bnrnn.commands.cluster status $(call quoted,out_dir=$(OUT))

status-%: setup  ## list the runs of reproduce-NAME: finished, running, queued, begun or failed, and the time left
	@set -e; $(RECIPES); for recipe in $$recipes; do $(PYTHON) -m bnrnn.commands.cluster status experiment=$$recipe $(RUN); done

plan-%: setup  ## list what reproduce-NAME would run, and how long it takes on this machine
	@set -e; $(RECIPES); test -n "$$recipes" || echo $(key) "trains nothing: reproducing it takes minutes on a CPU"; \
	for recipe in $$recipes; do $(PYTHON) -m bnrnn.commands.plan experiment=$$recipe $(RUN); done

# Failed runs (exit status 3, or 1 of a cluster) do not keep the others from being rendered, and fail at the end.
ifeq ($(SLURM),)
reproduce-%: setup  ## train all runs of a table or figure: reproduce-table1, reproduce-laurent2015-fig2
	@status=0; $(RECIPES); for recipe in $$recipes; do $(TRAIN) experiment=$$recipe $(RUN) || status=$$?; \
		test $$status = 0 -o $$status = 3 || exit $$status; done; \
	(set -e; $(RENDER)); rendered=$$?; test $$status = 0 || exit $$status; exit $$rendered
else
reproduce-%: setup
	@set -e; $(RECIPES); for recipe in $$recipes; do \
		$(PYTHON) -m bnrnn.commands.cluster submit wait=0 experiment=$$recipe $(RUN); done
	@$(if $(filter 0,$(WAIT)),exit;) status=0; $(RECIPES); for recipe in $$recipes; do \
		$(PYTHON) -m bnrnn.commands.cluster wait experiment=$$recipe $(RUN) || status=$$?; \
		test $$status -le 1 || exit $$status; done; \
	(set -e; $(RENDER)); rendered=$$?; test $$status = 0 || exit $$status; exit $$rendered
endif

render-%: setup  ## render what reproduce-NAME has trained
	@set -e; $(RENDER)

sweep-gamma: reproduce-fig6_pmnist  ## train on permuted MNIST with five initial gammas (Fig. 6)
