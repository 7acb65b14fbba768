"""Between the public functions and the engine: prompts, limits, memory, engines that are kept, and outputs as they grow."""
