/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A line becomes the record that its engine would publish, as far as the file has it:
 * without instance, session or figures. The size of a worker is known after all of its
 * lines, so records are completed at the end.
 */
#include "daemon/cluster/cluster_file.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "daemon/base/err.h"
#include "daemon/base/idmap.h"
#include "daemon/base/lines.h"
#include "daemon/base/mem.h"
#include "daemon/cluster/etcd_key.h"
#include "daemon/cluster/own_groups.h"
#include "daemon/cluster/record.h"
#include "daemon/cluster/roster.h"

#define SCHEME "file:"
#define PLACE_WORDS 4u /* GROUP WORKER TP.PP.DP.CP ENDPOINT */
#define WORDS_MAX (PLACE_WORDS + 5u)
#define FORM                                                                       \
	"must be: GROUP WORKER TP.PP.DP.CP ENDPOINT#KEY [pool=NAME] [model=NAME] " \
	"[url=URL] [engine=WORD] [bootstrap=HOST:PORT]"

struct worker {
	uint32_t size[PLACE_AXES];
};

/* A file that is being read. */
struct reading {
	struct lines lines;
	struct cluster_file *file;
	struct record record;  /* of the line */
	struct strmap places;  /* "GROUP WORKER TP.PP.DP.CP": struct cluster_line */
	struct strmap workers; /* "GROUP WORKER": struct worker */
};

bool cluster_file_is(const char *text)
{
	return strncmp(text, SCHEME, strlen(SCHEME)) == 0;
}

static int line_place(char *const *words, struct place *place)
{
	char key[ETCD_NAME_MAX];
	enum etcd_side side;
	int len = snprintf(key, sizeof(key), "/groups/%s/%s/%s", words[0], words[1],
			   words[2]);

	if (len >= (int)sizeof(key) || !etcd_key_read("", key, (size_t)len, &side, place))
		return err_raise(ERR_CONFIG,
				 "place '%.60s %.60s %.30s': names have letters, "
				 "digits, '.', '-', '_' and %%XX for any other byte, "
				 "'-' is a group's only worker, and ranks have the form "
				 "0.0.0.0",
				 words[0], words[1], words[2]);
	if (own_groups_are(place->group))
		return err_raise(ERR_CONFIG,
				 "group '%s': names that start with '" OWN_GROUPS_PREFIX
				 "' are reserved for daemons; choose another",
				 place->group);
	return err_pass(place_check(place));
}

static int line_option(struct record *record, const char *word)
{
	const struct {
		const char *name;
		char *out;
		size_t size;
	} options[] = {
		{"pool=", record->pools[0].name, sizeof(record->pools[0].name)},
		{"model=", record->pools[0].model, sizeof(record->pools[0].model)},
		{"url=", record->url, sizeof(record->url)},
		{"engine=", record->engine, sizeof(record->engine)},
		{"bootstrap=", record->bootstrap, sizeof(record->bootstrap)},
	};

	for (unsigned int i = 0; i < ARRAY_LEN(options); i++) {
		size_t len = strlen(options[i].name);

		if (strncmp(word, options[i].name, len) != 0)
			continue;
		if (*options[i].out)
			return err_raise(ERR_CONFIG, "%s is given twice",
					 options[i].name);
		if (!word[len] || strlen(word + len) >= options[i].size)
			return err_raise(ERR_CONFIG, "%s has %zu bytes (1 to %zu)",
					 options[i].name, strlen(word + len),
					 options[i].size - 1);
		snprintf(options[i].out, options[i].size, "%s", word + len);
		if (i < 2)
			record->pool_count = 1;
		return 0;
	}
	return err_raise(ERR_CONFIG, "'%.60s': " FORM, word);
}

static int line_record(char *const *words, unsigned int count, struct record *record)
{
	int r;

	record_init(record);
	r = record_reach(record, words[PLACE_WORDS - 1]);
	for (unsigned int i = PLACE_WORDS; i < count && r == 0; i++)
		r = line_option(record, words[i]);
	return r < 0 ? err_pass(r) : err_pass(record_check(record, NULL));
}

/* The worker has at least the ranks of this place. */
static int worker_grow(struct reading *reading, const char *name,
		       const struct place *place)
{
	struct worker *worker = strmap_get(&reading->workers, name);
	int r;

	if (!worker) {
		worker = mem_zalloc(sizeof(*worker));
		r = worker ? strmap_put(&reading->workers, name, worker) : -ENOMEM;
		if (r < 0) {
			mem_free(worker);
			return err_pass(r);
		}
	}
	for (unsigned int i = 0; i < PLACE_AXES; i++) {
		if (worker->size[i] <= place->rank[i])
			worker->size[i] = place->rank[i] + 1;
	}
	return 0;
}

/* "GROUP WORKER" of a place, or "GROUP WORKER TP.PP.DP.CP": no name has blanks. */
static void line_name(const struct place *place, bool ranks, char name[ETCD_NAME_MAX])
{
	etcd_place_key("", ETCD_RECORDS, place, name);
	if (!ranks)
		*strrchr(name, '/') = '\0';
}

static int line_write(struct cluster_line *line, const struct record *record)
{
	char text[DIRECTORY_RECORD_MAX];
	int r = record_make(record, text);

	if (r < 0)
		return err_pass(r);
	mem_free(line->record);
	line->record = mem_strdup(text);
	return line->record ? 0 : err_pass(-ENOMEM);
}

static int line_keep(struct reading *reading, struct cluster_line *line)
{
	reading->file->count++;
	for (unsigned int i = 0; i < PLACE_AXES; i++)
		reading->record.size[i] = line->place.rank[i] + 1;
	return err_pass(line_write(line, &reading->record));
}

static int line_read(struct reading *reading, char *text)
{
	struct cluster_file *file = reading->file;
	struct cluster_line *line = &file->lines[file->count];
	const struct cluster_line *before;
	char *words[WORDS_MAX], name[ETCD_NAME_MAX];
	unsigned int count = lines_words(text, words, WORDS_MAX);
	int r;

	if (count < PLACE_WORDS || count > WORDS_MAX)
		return err_raise(ERR_CONFIG, FORM);
	if (file->count == CLUSTER_FILE_LINES_MAX)
		return err_raise(
			ERR_CONFIG,
			"more than %u members; use etcd for a cluster of that size",
			file->count);
	r = line_place(words, &line->place);
	if (r == 0)
		r = line_record(words, count, &reading->record);
	if (r < 0)
		return err_pass(r);
	line->number = reading->lines.number;
	line_name(&line->place, true, name);
	before = strmap_get(&reading->places, name);
	if (before)
		return err_raise(ERR_CONFIG, "the place is in line %u already",
				 before->number);
	r = strmap_put(&reading->places, name, line);
	line_name(&line->place, false, name);
	if (r == 0)
		r = worker_grow(reading, name, &line->place);
	return r < 0 ? err_pass(r) : err_pass(line_keep(reading, line));
}

/* Of lines that line_keep() wrote. */
static int sizes_write(struct reading *reading)
{
	char name[ETCD_NAME_MAX];
	int r = 0;

	for (unsigned int i = 0; i < reading->file->count && r == 0; i++) {
		struct cluster_line *line = &reading->file->lines[i];
		const struct worker *worker;

		line_name(&line->place, false, name);
		worker = strmap_get(&reading->workers, name);
		r = record_read(line->record, &reading->record);
		memcpy(reading->record.size, worker->size, sizeof(worker->size));
		if (r == 0)
			r = line_write(line, &reading->record);
	}
	return err_pass(r);
}

static int reading_lines(struct reading *reading, const char *path)
{
	struct err why;
	char *line;
	int r = lines_check_writers(&reading->lines, path);

	while (r == 0 && (line = lines_next(&reading->lines))) {
		r = line_read(reading, line);
		if (r == 0)
			continue;
		err_take(&why);
		if (why.code == ERR_NOMEM)
			return err_reraise(&why);
		return err_raise(ERR_CONFIG, "%s:%u: %s", path, reading->lines.number,
				 why.text);
	}
	return r < 0 ? err_pass(r) : err_pass(sizes_write(reading));
}

static void reading_free(struct reading *reading)
{
	struct idmap_cursor at;

	strmap_foreach(&reading->workers, at) mem_free(at.value);
	strmap_fini(&reading->workers);
	strmap_fini(&reading->places);
	lines_fini(&reading->lines);
	mem_free(reading);
}

static int reading_begin(struct reading *reading, const char *path)
{
	unsigned int lines = 1;
	int r = lines_load(path, &reading->lines);

	if (r < 0)
		return err_pass(r);
	for (const char *at = reading->lines.text; (at = strchr(at, '\n')); at++)
		lines++;
	if (lines > CLUSTER_FILE_LINES_MAX)
		lines = CLUSTER_FILE_LINES_MAX;
	reading->file = mem_zalloc(sizeof(*reading->file));
	if (reading->file)
		reading->file->lines = mem_calloc(lines, sizeof(*reading->file->lines));
	return reading->file && reading->file->lines ? 0 : err_pass(-ENOMEM);
}

int cluster_file_load(const char *text, struct cluster_file **file_p)
{
	const char *path = text + strlen(SCHEME);
	struct reading *reading;
	int r;

	*file_p = NULL;
	if (*path != '/')
		return err_raise(
			ERR_CONFIG,
			"cluster: '%.100s': must be an absolute path after " SCHEME
			", as in file:/etc/kvd/members",
			text);
	reading = mem_zalloc(sizeof(*reading));
	if (!reading)
		return err_pass(-ENOMEM);
	strmap_init(&reading->places);
	strmap_init(&reading->workers);
	r = reading_begin(reading, path);
	if (r == 0)
		r = reading_lines(reading, path);
	if (r == 0)
		*file_p = reading->file;
	else
		cluster_file_free(reading->file);
	reading_free(reading);
	return err_pass(r);
}

void cluster_file_free(struct cluster_file *file)
{
	if (!file)
		return;
	for (unsigned int i = 0; file->lines && i < file->count; i++)
		mem_free(file->lines[i].record);
	mem_free(file->lines);
	mem_free(file);
}
