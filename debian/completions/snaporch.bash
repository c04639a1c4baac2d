# bash completion for snaporch
_snaporch() {
    local cur words cword breaks='' each
    # readline splits DOMAIN@SNAPSHOT into words, and replaces only the last of them
    _get_comp_words_by_ref -n @: cur words cword
    local IFS=$'\n'
    mapfile -t COMPREPLY < <(COMP_WORDS="${words[*]}" COMP_CWORD=$cword \
        _SNAPORCH_COMPLETE=complete_bash "$1" 2>/dev/null)
    for each in @ :; do
        [[ $COMP_WORDBREAKS != *"$each"* ]] || breaks+=$each
    done
    [[ -z $breaks ]] || COMPREPLY=("${COMPREPLY[@]#"${cur%"${cur##*["$breaks"]}"}"}")
}
complete -o default -F _snaporch snaporch
