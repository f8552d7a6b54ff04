# Sourced by the scripts beside it. uv does not read pip's configuration: this hands it on, so that a machine that is set up
# for pip (a mirror, a folder of wheels, a company's certificate) needs no second set-up.

# What pip of the interpreter $1 would use for option $2: its environment variable, else its configuration file.
pip_setting() {
    local variable
    variable="PIP_$(printf '%s' "$2" | tr 'a-z-' 'A-Z_')"
    if [ -n "${!variable:-}" ]; then
        printf '%s' "${!variable}"
    else
        "$1" -m pip config get "global.$2" 2>/dev/null || true
    fi
}

# Exports uv's settings from those of the pip of the interpreter $1; uv's own variables win.
use_pip_settings() {
    local find_links index certificate
    find_links=$(pip_setting "$1" find-links | xargs | tr ' ' ',')
    index=$(pip_setting "$1" index-url)
    certificate=$(pip_setting "$1" cert)
    [ -z "$find_links" ] || export UV_FIND_LINKS=${UV_FIND_LINKS:-$find_links}
    [ -z "$index" ] || export UV_DEFAULT_INDEX=${UV_DEFAULT_INDEX:-$index}
    [ -z "$certificate" ] || export SSL_CERT_FILE=${SSL_CERT_FILE:-$certificate}
}

# Whether one of the find-links offers torch; a remote page counts, since only uv can look into it.
find_links_offer_torch() {
    local place
    local IFS=,
    for place in ${UV_FIND_LINKS:-}; do
        case $place in
            http://* | https://*) return 0 ;;
        esac
        compgen -G "${place#file://}/torch-*.whl" >/dev/null && return 0
    done
    return 1
}
