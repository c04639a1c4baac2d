#compdef snaporch
eval "$(_TYPER_COMPLETE_ARGS="${words[1,$CURRENT]}" _SNAPORCH_COMPLETE=complete_zsh snaporch 2>/dev/null)"
