/* SPDX-License-Identifier: Apache-2.0 */
/*
 * replay: a fuzz target without libFuzzer. Runs each file that is named; without
 * names, as replay_NAME, every file of tests/fuzz/corpus/NAME (from the source
 * root), so that the corpus is a test with any compiler.
 */
#include <glob.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/fuzz/lib/fuzz.h"

static uint8_t *load(const char *path, size_t *size_p)
{
	FILE *f = fopen(path, "rb");
	uint8_t *data = NULL;
	long size;

	if (f && fseek(f, 0, SEEK_END) == 0 && (size = ftell(f)) >= 0) {
		rewind(f);
		*size_p = (size_t)size;
		data = malloc(*size_p + 1);
		if (data && fread(data, 1, *size_p, f) != *size_p) {
			free(data);
			data = NULL;
		}
	}
	if (!data)
		perror(path);
	if (f)
		fclose(f);
	return data;
}

static int run(const char *path)
{
	size_t size = 0;
	uint8_t *data = load(path, &size), *exact;

	if (!data)
		return 1;
	printf("[ RUN      ] %s\n", path);
	fflush(stdout); /* the input that it may die of */
	/* exactly as long as the input, so that a sanitizer sees one byte past it */
	exact = realloc(data, size ? size : 1);
	LLVMFuzzerTestOneInput(exact, size);
	free(exact);
	return 0;
}

static int run_corpus(const char *program)
{
	const char *name = strstr(program, "replay_");
	char pattern[256];
	int failed = 0;
	glob_t g;

	if (!name)
		return 2;
	snprintf(pattern, sizeof(pattern), "tests/fuzz/corpus/%s/*",
		 name + strlen("replay_"));
	if (glob(pattern, 0, NULL, &g) != 0) {
		fprintf(stderr, "%s: no files\n", pattern);
		return 1;
	}
	for (size_t i = 0; i < g.gl_pathc; i++)
		failed += run(g.gl_pathv[i]);
	printf("%zu passed, %d failed\n", g.gl_pathc - (size_t)failed, failed);
	globfree(&g);
	return failed != 0;
}

int main(int argc, char **argv)
{
	int failed = 0;

	if (argc == 1)
		return run_corpus(argv[0]);
	for (int i = 1; i < argc; i++)
		failed += run(argv[i]);
	printf("%d passed, %d failed\n", argc - 1 - failed, failed);
	return failed != 0;
}
