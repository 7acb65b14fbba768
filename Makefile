# The same commands as ./run, for those who type make.
.PHONY: demo test lint format check
demo test lint format check:
	./run $@ $(ARGS)
