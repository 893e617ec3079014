/* SPDX-License-Identifier: Apache-2.0 */
/* Whole files, read and written. */
#include <errno.h>
#include <fcntl.h>
#include <pwd.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "ctl/ctl.h"
#include "daemon/base/mem.h"

char *ctl_read_file(const char *path, size_t most, size_t *len_p)
{
	FILE *file = strcmp(path, "-") ? fopen(path, "re") : stdin;
	char *text = file ? malloc(most + 2) : NULL;

	if (text) {
		*len_p = fread(text, 1, most + 1, file);
		text[*len_p] = '\0';
		if (*len_p > most)
			errno = EFBIG;
		if (*len_p > most || ferror(file)) {
			free(text);
			text = NULL;
		}
	}
	if (file && file != stdin)
		fclose(file);
	return text;
}

int ctl_write_new(const char *path, mode_t mode, const struct passwd *owner,
		  const char *text)
{
	cleanup_close int fd = open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
	size_t len = strlen(text);

	if (fd < 0)
		return ctl_failed("%s: %s", path, strerror(errno));
	errno = ENOSPC; /* of a short write */
	if ((!owner || fchown(fd, owner->pw_uid, owner->pw_gid) == 0) &&
	    fchmod(fd, mode) == 0 && write(fd, text, len) == (ssize_t)len &&
	    fsync(fd) == 0)
		return CTL_OK;
	ctl_failed("%s: %s", path, strerror(errno));
	unlink(path);
	return CTL_ERROR;
}
