#!/usr/bin/env bash
# Counts with the base of a pull request and with its head, compares them, and says so in a comment.
# The exit status is 0 if all limits were judged and hold, otherwise 1, or 2 for a limit that dpbench does not
# know: it says so after both counts, because a run may define metrics. In the environment:
#   COUNT         the command that counts; it writes a run to {json}
#   LIMITS        limits, separated by spaces; at least one
#   BASE          the commit to compare with
#   PULL_REQUEST  its number; without one nothing is commented
set -uo pipefail
place=$(mktemp -d)
trap 'git worktree remove --force "$place/base" 2>/dev/null; rm -rf "$place"' EXIT

count() { # in a folder, whose code is imported although the head may be installed, into a file
  (
    cd "$1" || exit
    export PYTHONPATH="$PWD:$PWD/src${PYTHONPATH:+:$PYTHONPATH}"
    eval "${COUNT//'{json}'/"$2"}"
  )
}

foreign() { # the files of the head, or of a copy that pip has installed, that the base imported
  grep -oE '"[^"]*\.(py|so)": "' "$place/base.json" | cut -d '"' -f 2 | grep -vF "$place/base/" |
    grep -F -e "$PWD/" -e "$(pwd -P)/" -e "-packages/" | sort -u | head -n 3 | tr '\n' ' '
}

comment() { # edits the comment of this command, whose first line is hidden and marks it, or else adds it
  local marker own
  marker="<!-- dpbench: $(git hash-object --stdin <<< "$COUNT") -->" # a command may have lines, --> or a secret
  { echo "$marker"; cat "$place/said.md"; } > "$place/comment.md"
  own=$(gh pr view "$PULL_REQUEST" --json comments \
    --jq '.comments[] | select(.viewerDidAuthor) | .url + " " + (.body | split("\n")[0])') || return
  own=$(grep -F "$marker" <<< "$own" | tail -n 1 | cut -d ' ' -f 1)
  if [ -n "$own" ]; then
    gh api --silent -X PATCH "repos/{owner}/{repo}/issues/comments/${own##*-}" -F "body=@$place/comment.md"
  else
    gh pr comment "$PULL_REQUEST" --body-file "$place/comment.md"
  fi
}

report() { # a status and what was said
  {
    echo "### dpbench: what a training step moves"
    printf '```\n%s\n```\n' "$2"
  } > "$place/said.md"
  cat "$place/said.md"
  [ -z "${GITHUB_STEP_SUMMARY:-}" ] || cat "$place/said.md" >> "$GITHUB_STEP_SUMMARY"
  [ -z "${PULL_REQUEST:-}" ] || comment ||
    echo "dpbench: no comment was written: the job needs 'pull-requests: write', which forks cannot have" >&2
  exit "$1"
}

case "$COUNT" in *'{json}'*) ;; *) report 1 "The input count must write a run to {json}: $COUNT" ;; esac
[[ $LIMITS =~ [^[:space:]] ]] || report 1 "The input limits is empty, so nothing would be judged."
git cat-file -e "$BASE^{commit}" 2>/dev/null || git fetch --quiet --depth=1 origin "$BASE" ||
  report 1 "The base commit $BASE cannot be fetched."
git -c core.hooksPath=/dev/null worktree add --quiet --detach "$place/base" "$BASE" || report 1 "The base $BASE cannot be checked out."
count "$place/base" "$place/base.json" || report 1 "The base $BASE cannot be counted, so nothing was judged.
If this change adds or renames the script, or adds an option that the input count uses, merge it without this
check, or write a count that runs at both commits. If data is missing, which git ignores: let the count get it."
foreign=$(foreign)
[ -z "$foreign" ] || report 1 "The base imported code of this change, so nothing was judged: $foreign
Begin the input count with PYTHONPATH=FOLDER, the folder of the package in the repository."
count . "$place/head.json" || report 1 "This change cannot be counted, so nothing was judged."
limits=()
for limit in $LIMITS; do limits+=(--fail "$limit"); done
said=$(COLUMNS=100 dpbench compare "$place/base.json" "$place/head.json" "${limits[@]}" 2>&1)
report $? "$said"
