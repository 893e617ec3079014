#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Mistakes in gpu/attend.cu, each of which a case of test_attend_gpu has to see: the maps
# of fragments, barriers, ends of lists and tails, masking by a weight of 0, softmax,
# pages, turns, splits. (The text without mistakes is the unit test's.)
set -u
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
passed=0 failed=0
cc=${CC:-gcc}

compile() # SOURCE OBJECT [FLAG...]
{
	source=$1 object=$2
	shift 2
	$cc -std=gnu11 -O1 -D_GNU_SOURCE -I. -Iproto -ffp-contract=off "$@" \
		-c "$source" -o "$object" >"$out/log" 2>&1
}

for source in daemon/math/*.c tests/lib/attend_case.c gpu/attend_plan.c \
	gpu/attend_image.c tests/unit/test_attend_gpu.c; do
	name=${source##*/}
	if ! compile "$source" "$out/${name%.c}.o"; then
		cat "$out/log"
		echo "0 passed, 1 failed"
		exit 1
	fi
done

# The whole as it is, so that a mistake is seen for what it is.
program() # KERNELS
{
	compile tests/gpu/attend_fiber.c "$out/attend_fiber.o" -DATTEND_CU="\"$1\"" &&
		$cc "$out"/*.o -o "$out/program" -lcmocka -lm -pthread >"$out/log" 2>&1
}

if ! program "$PWD/gpu/attend.cu" || ! "$out/program" >"$out/said" 2>&1; then
	cat "$out/log" "$out/said"
	echo "0 passed, 1 failed"
	exit 1
fi
passed=1
while IFS='@' read -r case mistake; do
	sed "$mistake" gpu/attend.cu >"$out/attend.cu"
	if cmp -s gpu/attend.cu "$out/attend.cu" || ! program "$out/attend.cu"; then
		cat "$out/log"
		echo "FAILED: no mistake: $mistake"
		failed=$((failed + 1))
	elif timeout 60 "$out/program" "$case*" >"$out/said" 2>&1; then
		echo "FAILED: not seen by $case: $mistake"
		failed=$((failed + 1))
	else
		passed=$((passed + 1))
	fi
done <<'MISTAKES'
dense@s|(g + i % 2 \* 8)|(g + i / 2 * 8)|
dense@s|2 \* t + i / 2 \* 8|2 * t|
dense@s|(token + d + 8)|(token + d)|
dense@s|(i % 2 + i / 2 \* 8) \* v_stride|(i / 2 + i % 2 * 8) * v_stride|
dense@s|attend_mma(o\[2 \* j + 1\], a, odd)|attend_mma(o[2 * j + 1], a, even)|
dense@s|16 \* j + lane % 4 \* 4|16 * j + lane % 4 * 2|
dense@s|to\[1\] = o\[2 \* j + 1\]\[2 \* i\]|to[1] = o[2 * j][2 * i + 1]|
dense@s|lane % 4 \* 2 + i % 2\]|lane % 4 * 2]|
dense@s|rescale(b, o, dv / WARPS / 8);|rescale(b, o, dv / WARPS / 8 - 1);|
dense@/^\t\tfind(a/{n;d}
dense@/^\t\t\tstage(b->v/{n;d}
dense@/^\t\tlogits(b/{n;d}
dense@/^\t\tweights(a/{n;d}
dense@s|__syncthreads(); /\* all have read their scale \*/||
dense@/l == 0 ? 0 : 1 . l/{n;d}
merge@/l.threadIdx.x. = /{n;n;d}
merge@/out_l + at, 4, true));/{n;d}
limits@s|place + i < end|place + i <= end|
tail@s|place + i < end|place + i + 1 < end|
splits@s|tile->end - tile->begin + TOKENS - 1|tile->end - tile->begin|
limits@s|to == steps ? tile->end : ||
poison@s|if (at\[token\])|if (1)|
poison@/^INLINE void find/,/^}/s/^}/\tif (place + i >= end)\n\t\tb->k_at[i] \|= 1;\n}/;s/if (place + i < end)/if (!tile->select \|\| place + i < end)/;s/(at\[token\] + 2 \* d/((at[token] \& ~(uint64_t)1) + 2 * d/;s/if (!b->k_at\[token + i\])/if (!b->k_at[token + i] \|\| (b->k_at[token + i] \& 1))/
selection@s|if (!b->k_at\[token + i\])|if (0)|
selection@s|!tile->select)|tile->begin == 0)|
selection@s|tile->select + 4 \* (uint64_t)place|tile->select + 2 * (uint64_t)place|
row_without@s|most == -INFINITY ? 0 : most|most|
row_without@s|l == 0 ? 0 : 1 / l|1 / l|
logits@s|\*l_p \* x\[0\] + sum|*l_p + sum|
logits@s|o\[j\]\[i\] \* scale\[i / 2\]|o[j][i]|
logits@s|a->softcap \* tanhf|tanhf|
dense@s|far < PER_ROW; far \*= 2)|far < PER_ROW / 2; far *= 2)|
dense@s|sum = sum + __shfl_xor_sync(~0u, sum, far)|sum = sum + __shfl_xor_sync(~0u, sum, far ^ 1)|
dense@s|(uint64_t)in->first + token|(uint64_t)token|
dense@s|at % in->page_tokens|token % in->page_tokens|
dense@s|in->pages + 4 \* page|in->pages + 4 * (page ^ 1)|
dense@s| + head \* field->head_stride||
dense@s|row < tile->rows)|row <= tile->rows)|
dense@s|tile->first + row|row|
limits@s|x \* cosine - other|x * cosine + other|
limits@s|number \* turns->dims|number * turns->dims / 2|
limits@s|turn + 4 \* n|turn + 4|
limits@s|value_to_bf16(x - value_from_bf16(near))|(uint16_t)0|
limits@s|b->k + dqk - low|b->k|
limits@s|if (tile->turned)$|if (0)|
splits@s|blockIdx.y \* a->plane + 4 \* at|4 * at|
splits@s|blockIdx.y \* a->plane + 4 \* (uint64_t)(tile|4 * (uint64_t)(tile|
splits@s|steps \* (blockIdx.y + 1) / gridDim.y|steps * blockIdx.y / gridDim.y|
merge@s|a.o + used\[i\] \* a.part_plane|a.o + i * a.part_plane|
merge@s|x \* share\[i\] : x|__builtin_fmaf(x, share[i], sum) - sum : x|
splice@s|second ? x|x|;s|if (second) {|if (second \&\& halves) {|
splice@s|d - a->turn.first >= a->turn.dims|d - a->turn.first > a->turn.dims|
splice@s|halves ? x + n : x + 1|x + 1|
MISTAKES
echo "$passed passed, $failed failed"
[ $failed -eq 0 ]
