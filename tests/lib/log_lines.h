/* SPDX-License-Identifier: Apache-2.0 */
/* What the log writes to stderr, read back. */
#ifndef KVD_TESTS_LIB_LOG_LINES_H
#define KVD_TESTS_LIB_LOG_LINES_H

void log_lines_begin(void);
/* All that was logged since; the text lives until the next call. */
const char *log_lines_end(void);
/* Lines with these words in the text. */
unsigned int log_lines_with(const char *text, const char *words);

#endif
