# fish completion for snaporch
function __snaporch
    _SNAPORCH_COMPLETE=complete_fish _TYPER_COMPLETE_FISH_ACTION=$argv[1] _TYPER_COMPLETE_ARGS=(commandline -cp) \
        snaporch 2>/dev/null
end
complete --command snaporch --no-files --arguments '(__snaporch get-args)' --condition '__snaporch is-args'
