/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/base/lines.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "daemon/base/err.h"
#include "daemon/base/mem.h"

#define FILE_BYTES_MAX (1u << 20)
#define SPACE " \t\r"

int lines_load(const char *path, struct lines *lines_p)
{
	cleanup_close int fd = open(path, O_RDONLY | O_CLOEXEC | O_NOCTTY);
	cleanup_free char *text = NULL;
	struct stat st;
	size_t have = 0;

	*lines_p = (struct lines){.text = NULL};
	if (fd < 0 || fstat(fd, &st) != 0)
		return err_raise(ERR_CONFIG, "%s: %s", path, strerror(errno));
	if (!S_ISREG(st.st_mode) || st.st_size > FILE_BYTES_MAX)
		return err_raise(ERR_CONFIG, "%s: must be a file of at most %u bytes",
				 path, FILE_BYTES_MAX);
	text = mem_zalloc((size_t)st.st_size + 1);
	if (!text)
		return err_pass(-ENOMEM);
	while (have < (size_t)st.st_size) {
		ssize_t n = read(fd, text + have, (size_t)st.st_size - have);

		if (n < 0 && errno != EINTR)
			return err_raise(ERR_CONFIG, "%s: %s", path, strerror(errno));
		if (n == 0)
			break;
		have += n > 0 ? (size_t)n : 0;
	}
	*lines_p = (struct lines){.mode = st.st_mode, .size = have};
	lines_p->rest = lines_p->text = mem_steal(text);
	return 0;
}

char *lines_next(struct lines *lines)
{
	char *line;

	while ((line = strsep(&lines->rest, "\n"))) {
		lines->number++;
		line += strspn(line, SPACE);
		if (*line && *line != '#')
			return line;
	}
	return NULL;
}

void lines_fini(struct lines *lines)
{
	if (lines->text)
		explicit_bzero(lines->text, lines->size);
	mem_free(lines->text);
	*lines = (struct lines){.text = NULL};
}

int lines_check_writers(const struct lines *lines, const char *path)
{
	if (lines->mode & S_IWOTH)
		return err_raise(ERR_CONFIG,
				 "%s: must not be writable by others; chmod o-w", path);
	return 0;
}

unsigned int lines_words(char *line, char **words, unsigned int most)
{
	unsigned int count = 0;
	char *word;

	while ((word = strsep(&line, SPACE))) {
		if (!*word)
			continue;
		if (count == most)
			return most + 1;
		words[count++] = word;
	}
	return count;
}
