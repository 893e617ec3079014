/* SPDX-License-Identifier: Apache-2.0 */
/* stdio: descriptors 0, 1 and 2, before a program opens anything. */
#ifndef KVD_BASE_STDIO_H
#define KVD_BASE_STDIO_H

/* Those that the program was started without are /dev/null from now on: a socket or a
 * file that was given such a number would get what is printed. First in main(). Ends the
 * program with 1 where there is no /dev/null: nothing can be said then. */
void stdio_open(void);

#endif
